// Tokens drawn from filtered distributions, a row at a time: no row is sorted. What a cut leaves is found through a
// histogram of the numbers' leading bits, which order positive floats, and by sorting the one bucket in which it ends.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

namespace ropewalk {
namespace {

constexpr int shift = 19;  // leaves the exponent and four bits of the mantissa
constexpr std::size_t buckets = (0x3f800000u >> shift) + 1;  // up to 1

std::size_t bucket_of(float probability) {
  return std::min<std::size_t>(std::bit_cast<std::uint32_t>(probability) >> shift, buckets - 1);
}

struct Row {
  const float* probabilities;
  std::int64_t size;

  const float* begin() const { return probabilities; }
  const float* end() const { return probabilities + size; }
};

struct Histogram {
  // Neighbours are counted apart: most fall into few buckets, and each addition would wait for the one before it.
  static constexpr std::size_t copies = 4;

  std::vector<std::int64_t> counts = std::vector<std::int64_t>(buckets * copies);
  std::vector<double> masses = std::vector<double>(buckets * copies);

  explicit Histogram(Row row) {
    for (std::int64_t token = 0; token < row.size; ++token) {
      const float probability = row.probabilities[token];
      if (!(probability > 0)) continue;
      const std::size_t place = bucket_of(probability) * copies + token % copies;
      ++counts[place];
      masses[place] += probability;
    }
  }

  std::int64_t count(std::size_t bucket) const {
    const auto first = counts.begin() + bucket * copies;
    return std::accumulate(first, first + copies, std::int64_t{0});
  }

  double mass(std::size_t bucket) const {
    const auto first = masses.begin() + bucket * copies;
    return std::accumulate(first, first + copies, 0.0);
  }
};

// The numbers of one bucket, falling.
std::vector<float> members(Row row, std::size_t bucket) {
  std::vector<float> found;
  for (const float probability : row)
    if (probability > 0 && bucket_of(probability) == bucket) found.push_back(probability);
  std::sort(found.begin(), found.end(), std::greater<>());
  return found;
}

// What stays of a row: all above `least`, and the first `ties` of those that equal it.
struct Cut {
  float least = 0;
  std::int64_t ties = 0;
};

// The top_k likeliest, with all that equal the last of them.
Cut cut_by_count(Row row, const Histogram& histogram, std::int64_t top_k) {
  std::int64_t above = 0;
  for (std::size_t bucket = buckets; bucket-- > 0;) {
    const std::int64_t count = histogram.count(bucket);
    if (above + count >= top_k) return {members(row, bucket)[top_k - above - 1], row.size};
    above += count;
  }
  return {0, row.size};
}

double mass_of(Row row, Cut cut) {
  double mass = 0;
  for (const float probability : row)
    if (probability >= cut.least) mass += probability;
  return mass;
}

// The likeliest of what a cut left that together have `target`: those before which there is less than that.
Cut cut_by_mass(Row row, const Histogram& histogram, Cut before, double target) {
  double above = 0;
  for (std::size_t bucket = buckets; bucket-- > 0;) {
    const double mass = histogram.mass(bucket);
    if (histogram.count(bucket) == 0 || above + mass < target) {
      above += mass;
      continue;
    }
    Cut cut;
    for (const float probability : members(row, bucket)) {
      if (probability < before.least) break;
      cut.ties = probability == cut.least ? cut.ties + 1 : 1;
      cut.least = probability;
      above += probability;
      if (above >= target) break;
    }
    return cut;
  }
  return before;
}

std::int64_t draw_one(Row row, std::int64_t top_k, double top_p, double min_p, double draw) {
  Cut cut{0, row.size};
  if (top_k < row.size || top_p < 1) {
    const Histogram histogram(row);
    if (top_k < row.size) cut = cut_by_count(row, histogram, top_k);
    if (top_p < 1) cut = cut_by_mass(row, histogram, cut, top_p * mass_of(row, cut));
  }
  const float floor = static_cast<float>(min_p) * *std::max_element(row.begin(), row.end());
  if (floor > cut.least) cut = {floor, row.size};
  std::vector<std::pair<double, std::int64_t>> kept;
  for (std::int64_t token = 0; token < row.size; ++token) {
    const float probability = row.probabilities[token];
    if (!(probability > 0) || probability < cut.least) continue;
    if (probability == cut.least && cut.ties-- <= 0) continue;
    kept.emplace_back(probability, token);
  }
  if (kept.empty()) return row.size - 1;  // a row of NaN gets a token of the vocabulary all the same
  double total = 0;
  for (const auto& [probability, token] : kept) total += probability;
  double cumulative = 0;
  for (const auto& [probability, token] : kept) {
    cumulative += probability;
    if (cumulative > draw * total) return token;
  }
  return kept.back().second;
}

at::Tensor draw(const at::Tensor& probabilities, const at::Tensor& top_k, const at::Tensor& top_p, const at::Tensor& min_p,
                const at::Tensor& draws) {
  TORCH_CHECK(probabilities.dim() == 2 && probabilities.is_contiguous() && probabilities.scalar_type() == at::kFloat,
              "expected float32 probabilities [rows, vocabulary] without gaps");
  const std::int64_t rows = probabilities.size(0), size = probabilities.size(1);
  TORCH_CHECK(size > 0 && top_k.numel() == rows && top_p.numel() == rows && min_p.numel() == rows && draws.numel() == rows,
              "expected one top_k, top_p, min_p and draw for each row");
  const at::Tensor chosen = at::empty({rows}, probabilities.options().dtype(at::kLong));
  const auto *count = top_k.const_data_ptr<std::int64_t>();
  const auto *mass = top_p.const_data_ptr<float>(), *share = min_p.const_data_ptr<float>();
  const auto* random = draws.const_data_ptr<double>();
  const auto* numbers = probabilities.const_data_ptr<float>();
  auto* tokens = chosen.mutable_data_ptr<std::int64_t>();
  at::parallel_for(0, rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row)
      tokens[row] = draw_one({numbers + row * size, size}, count[row], mass[row], share[row], random[row]);
  });
  return chosen;
}

}  // namespace
}  // namespace ropewalk

TORCH_LIBRARY_FRAGMENT(ropewalk, library) {
  library.def("draw(Tensor probabilities, Tensor top_k, Tensor top_p, Tensor min_p, Tensor draws) -> Tensor");
  library.impl("draw", c10::DispatchKey::CPU, TORCH_FN(ropewalk::draw));
}
