// The inner loops of sampling, one set for each instruction set. Internal to sampling.cpp.
#pragma once

#include "dispatch.h"

namespace ropewalk {

// Logits that are looked at together.
constexpr std::int64_t kSamplingBlock = 64;

struct SamplingKernels {
  // The largest logit of each block; the last block may be shorter.
  void (*maxima)(const float* logits, std::int64_t size, float* maxima);
  // weights [size] = 2^((logit - largest) * scale).
  void (*weigh)(const float* logits, std::int64_t size, float largest, float scale, float* weights);
  // The sum of each block's weights.
  void (*sums)(const float* logits, std::int64_t size, float largest, float scale, float* sums);
};

ROPEWALK_DECLARE_KERNELS(SamplingKernels, sampling_kernels)

}  // namespace ropewalk
