// Tokens chosen from logits, a row at a time: no row is sorted. What a filter cannot keep is found from the largest logits
// of blocks, so that nearly all of a row is looked at once or twice, in vectors, and only candidates are written down.
#include "sampling_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

namespace ropewalk {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();
// By how much exponents of two that bound weights are too low, so that rounding leaves out nothing that stays.
constexpr double kMargin = 0.01;
// Of the weight that is tried first where only the heaviest tokens may matter, and the steps from there.
constexpr double kFirstExponent = -6;
// Below it there are no weights.
constexpr double kLastExponent = -150;

// How a token is chosen. A token's weight is 2^((logit - largest) * scale): its probability over that of the likeliest.
struct Filters {
  double temperature;
  std::int64_t top_k;
  double top_p;
  double min_p;
};

struct Candidate {
  float weight;
  std::int64_t token;
};

// Heavier first, and of equals the first.
bool goes_before(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

double mass(auto first, auto last) {
  return std::accumulate(first, last, 0.0, [](double sum, const Candidate& one) { return sum + one.weight; });
}

// Memory that is used again from row to row.
struct Scratch {
  std::vector<float> maxima, sums, logits, weights, order;
  std::vector<std::int64_t> tokens;
  std::vector<Candidate> candidates, sorted;
};

class Row {
 public:
  Row(const float* logits, std::int64_t size, const SamplingKernels& kernels, Scratch& scratch)
      : logits_(logits), size_(size), kernels_(kernels), scratch_(scratch) {
    scratch.maxima.resize((size + kSamplingBlock - 1) / kSamplingBlock);
    kernels.maxima(logits, size, scratch.maxima.data());
    largest_ = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
  }

  // The first of the likeliest. A row of NaN gets a token of the vocabulary all the same.
  std::int64_t likeliest() const {
    const auto block = std::find(scratch_.maxima.begin(), scratch_.maxima.end(), largest_) - scratch_.maxima.begin();
    const float* const first = logits_ + std::min(size_, block * kSamplingBlock);
    return std::min(size_ - 1, std::find(first, logits_ + size_, largest_) - logits_);
  }

  // Filters in the order top_k, top_p, min_p, then the token at which the cumulative weight first exceeds draw * total.
  std::int64_t drawn(const Filters& filters, double draw) {
    if (!std::isfinite(largest_)) return likeliest();
    scale_ = static_cast<float>(std::numbers::log2e / filters.temperature);
    const bool by_count = filters.top_k < size_, by_mass = filters.top_p < 1;
    auto& candidates = scratch_.candidates;
    double total = 0;
    if (by_count) {
      keep_likeliest(filters.top_k);
      weigh();
      if (candidates.empty()) return likeliest();  // NaN among the largest of the blocks
      total = mass(candidates.begin(), candidates.end());
    } else {
      total = sum();
      if (!by_mass && filters.min_p == 0) return drawn_from_all(draw * total);
      // Even all together, tokens lighter than the second number are no more than what top_p leaves out.
      const double lightest = std::max(filters.min_p, by_mass ? (1 - filters.top_p) * total / size_ : 0);
      collect_down_to(std::max(std::log2(lightest) - kMargin, kLastExponent), by_mass ? filters.top_p * total : total);
    }
    if (by_mass) keep_mass(filters.top_p * total);
    std::erase_if(candidates, [&](const Candidate& one) { return one.weight < filters.min_p; });
    return drawn_from(candidates, draw * mass(candidates.begin(), candidates.end()));
  }

 private:
  // The weight of all tokens.
  double sum() {
    scratch_.sums.resize(scratch_.maxima.size());
    kernels_.sums(logits_, size_, largest_, scale_, scratch_.sums.data());
    return std::accumulate(scratch_.sums.begin(), scratch_.sums.end(), 0.0);
  }

  // Tokens whose logits are no less than this, in order.
  void collect(float least) {
    auto& [maxima, sums, logits, weights, order, tokens, candidates, sorted] = scratch_;
    tokens.resize(size_);
    logits.resize(size_);
    std::int64_t found = 0;
    for (std::size_t block = 0; block < maxima.size(); ++block) {
      if (!(maxima[block] >= least)) continue;
      const std::int64_t first = block * kSamplingBlock, last = std::min(size_, first + kSamplingBlock);
      for (std::int64_t token = first; token < last; ++token) {
        tokens[found] = token;
        logits[found] = logits_[token];
        found += logits_[token] >= least;
      }
    }
    tokens.resize(found);
    logits.resize(found);
  }

  // Candidates of no less than 2^exponent, or as many of the heaviest as have `enough`: far fewer, as a rule.
  void collect_down_to(double exponent, double enough) {
    const auto& candidates = scratch_.candidates;
    for (double reached = kFirstExponent;; reached += kFirstExponent) {
      const double least = std::max(reached, exponent);
      collect(static_cast<float>(largest_ + least / scale_));
      weigh();
      if (least == exponent || mass(candidates.begin(), candidates.end()) >= enough) return;
    }
  }

  // The `count` likeliest, with all that equal the last of them.
  void keep_likeliest(std::int64_t count) {
    auto& order = scratch_.order;
    order = scratch_.maxima;
    // As many blocks have a logit of at least the count-th largest maximum, so that none below it can be kept.
    const bool is_bound = count <= static_cast<std::int64_t>(order.size());
    collect(is_bound ? nth_largest(order, count) : kLeast);
    order = scratch_.logits;
    if (count < static_cast<std::int64_t>(order.size())) collect(nth_largest(order, count));
  }

  static float nth_largest(std::vector<float>& numbers, std::int64_t count) {
    const auto place = numbers.begin() + count - 1;
    std::nth_element(numbers.begin(), place, numbers.end(), std::greater<>());
    return *place;
  }

  // From collected logits to candidates.
  void weigh() {
    auto& [maxima, sums, logits, weights, order, tokens, candidates, sorted] = scratch_;
    weights.resize(logits.size());
    kernels_.weigh(logits.data(), logits.size(), largest_, scale_, weights.data());
    candidates.resize(logits.size());
    for (std::size_t i = 0; i < candidates.size(); ++i) candidates[i] = {weights[i], tokens[i]};
  }

  // The heaviest that together have `target`: those before which there is less than that. Halves of what is not decided
  // are put in order of each other until little is left, which is then sorted.
  void keep_mass(double target) {
    auto& sorted = scratch_.sorted;
    sorted = scratch_.candidates;
    auto first = sorted.begin(), last = sorted.end();
    double before = 0;
    while (last - first > 32) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, goes_before);
      const double heavier = before + mass(first, middle);
      if (heavier < target) {
        before = heavier;
        first = middle;
      } else {
        last = middle;
      }
    }
    std::sort(first, last, goes_before);
    while (first + 1 != last && (before += first->weight) < target) ++first;
    const Candidate lightest = *first;
    std::erase_if(scratch_.candidates, [&](const Candidate& one) { return goes_before(lightest, one); });
  }

  // The token at which the cumulative weight first exceeds `share`; the last that can be if rounding lets none.
  static std::int64_t drawn_from(const std::vector<Candidate>& candidates, double share) {
    double cumulative = 0;
    std::int64_t token = candidates.back().token;
    for (const Candidate& one : candidates) {
      if (!(one.weight > 0)) continue;
      token = one.token;
      cumulative += one.weight;
      if (cumulative > share) break;
    }
    return token;
  }

  // The same for all tokens: the block first, then a token of it.
  std::int64_t drawn_from_all(double share) {
    const auto& sums = scratch_.sums;
    std::int64_t reached = 0;
    double cumulative = 0;
    for (std::int64_t block = 0; block < static_cast<std::int64_t>(sums.size()); ++block) {
      if (!(sums[block] > 0)) continue;
      reached = block;
      if (cumulative + sums[block] > share) break;
      cumulative += sums[block];
    }
    const std::int64_t first = reached * kSamplingBlock, last = std::min(size_, first + kSamplingBlock);
    auto& [maxima, all, logits, weights, order, tokens, candidates, sorted] = scratch_;
    logits.assign(logits_ + first, logits_ + last);
    tokens.resize(last - first);
    std::iota(tokens.begin(), tokens.end(), first);
    weigh();
    return drawn_from(candidates, share - cumulative);
  }

  const float* logits_;
  std::int64_t size_;
  const SamplingKernels& kernels_;
  Scratch& scratch_;
  float largest_ = 0;
  float scale_ = 0;
};

at::Tensor choose(const at::Tensor& logits, const at::Tensor& sampled, const at::Tensor& temperature, const at::Tensor& top_k,
                  const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& draws) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat,
              "expected float32 logits [rows, vocabulary] without gaps");
  const std::int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(size > 0, "expected a vocabulary");
  const auto check = [&](const at::Tensor& numbers, at::ScalarType type) {
    TORCH_CHECK(numbers.numel() == sampled.numel() && numbers.is_contiguous() && numbers.scalar_type() == type,
                "expected one temperature, top_k, top_p, min_p and draw for each sampled row");
  };
  check(sampled, at::kLong);
  check(temperature, at::kFloat);
  check(top_k, at::kLong);
  check(top_p, at::kFloat);
  check(min_p, at::kFloat);
  check(draws, at::kDouble);
  std::vector<std::int64_t> places(rows, -1);  // of a row among the sampled ones
  for (std::int64_t place = 0; place < sampled.numel(); ++place) {
    const std::int64_t row = sampled.const_data_ptr<std::int64_t>()[place];
    TORCH_CHECK(0 <= row && row < rows, "expected sampled rows of the logits");
    TORCH_CHECK(top_k.const_data_ptr<std::int64_t>()[place] > 0 && temperature.const_data_ptr<float>()[place] > 0,
                "expected every top_k and temperature to be above 0");
    places[row] = place;
  }
  const auto filters_of = [&](std::int64_t place) {
    return Filters{temperature.const_data_ptr<float>()[place], top_k.const_data_ptr<std::int64_t>()[place],
                   top_p.const_data_ptr<float>()[place], min_p.const_data_ptr<float>()[place]};
  };
  const at::Tensor chosen = at::empty({rows}, logits.options().dtype(at::kLong));
  const auto* numbers = logits.const_data_ptr<float>();
  const auto* random = draws.const_data_ptr<double>();
  auto* tokens = chosen.mutable_data_ptr<std::int64_t>();
  const SamplingKernels& kernels = ROPEWALK_KERNELS_AT(current_level(), sampling_kernels);
  at::parallel_for(0, rows, 1, [&](std::int64_t first, std::int64_t last) {
    Scratch scratch;
    for (std::int64_t row = first; row < last; ++row) {
      Row one(numbers + row * size, size, kernels, scratch);
      const std::int64_t place = places[row];
      tokens[row] = place < 0 ? one.likeliest() : one.drawn(filters_of(place), random[place]);
    }
  });
  return chosen;
}

}  // namespace
}  // namespace ropewalk

TORCH_LIBRARY_FRAGMENT(ropewalk, library) {
  library.def(
      "choose(Tensor logits, Tensor sampled, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor draws)"
      " -> Tensor");
  library.impl("choose", c10::DispatchKey::CPU, TORCH_FN(ropewalk::choose));
}
