// Passes over a row of logits in vectors. Compiled once for each instruction set.
//
// Knows largest values and weights. Does not know which tokens are kept, or why.
#include "sampling_kernels.h"
#include "simd.h"

namespace ropewalk::ROPEWALK_LEVEL {
namespace {

static_assert(kSamplingBlock % kWidth == 0);

ROPEWALK_INLINE std::int64_t shorter(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

ROPEWALK_INLINE float largest_in(const float* logits, std::int64_t size) {
  float largest = logits[0];
  std::int64_t at = 0;
  if (size >= kWidth) {
    Floats found = load(logits);
    for (at = kWidth; at + kWidth <= size; at += kWidth) found = larger(found, load(logits + at));
    largest = largest_of(found);
  }
  for (; at < size; ++at) largest = logits[at] > largest ? logits[at] : largest;
  return largest;
}

ROPEWALK_INLINE Floats weights_of(Floats logits, Floats largest, Floats scale) {
  return exp2_of((logits - largest) * scale);
}

ROPEWALK_INLINE float sum_in(const float* logits, std::int64_t size, Floats largest, Floats scale) {
  Floats sum{};
  std::int64_t at = 0;
  for (; at + kWidth <= size; at += kWidth) sum += weights_of(load(logits + at), largest, scale);
  float total = sum_of(sum);
  if (at < size) {
    const Floats rest = weights_of(load_some(logits + at, size - at), largest, scale);
    for (std::int64_t lane = 0; lane < size - at; ++lane) total += rest[lane];
  }
  return total;
}

void maxima(const float* logits, std::int64_t size, float* maxima) {
  for (std::int64_t at = 0; at < size; at += kSamplingBlock)
    *maxima++ = largest_in(logits + at, shorter(kSamplingBlock, size - at));
}

void weigh(const float* logits, std::int64_t size, float largest, float scale, float* weights) {
  const Floats most = all(largest), by = all(scale);
  for (std::int64_t at = 0; at < size; at += kWidth)
    store_some(weights + at, weights_of(load_some(logits + at, size - at), most, by), size - at);
}

void sums(const float* logits, std::int64_t size, float largest, float scale, float* sums) {
  const Floats most = all(largest), by = all(scale);
  for (std::int64_t at = 0; at < size; at += kSamplingBlock)
    *sums++ = sum_in(logits + at, shorter(kSamplingBlock, size - at), most, by);
}

}  // namespace

const SamplingKernels& sampling_kernels() {
  static constexpr SamplingKernels kernels{maxima, weigh, sums};
  return kernels;
}

}  // namespace ropewalk::ROPEWALK_LEVEL
