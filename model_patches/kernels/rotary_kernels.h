// The inner loops of rotation, one set for each instruction set. Internal: other operators call rotary.h.
#pragma once

#include "common.h"

namespace ropewalk {

struct RotaryKernels {
  // One head of one token, `dim` numbers of it, of which the first 2 * pairs are rotated (none where `pairs` is 0) →
  // float32.
  void (*rotate)(const void* head, Number number, std::int64_t dim, const float* cos, const float* sin,
                 std::int64_t pairs, bool interleaved, float* rotated);
  // Round to a row's number type.
  void (*round)(const float* head, std::int64_t dim, Number number, void* to);
  // Round to the number type of pages, into one row of them.
  void (*keep)(const float* head, const PagedRows& pages, std::int64_t row);
};

namespace portable {
const RotaryKernels& rotary_kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const RotaryKernels& rotary_kernels();
}
namespace avx512 {
const RotaryKernels& rotary_kernels();
}
namespace avx512_bf16 {
const RotaryKernels& rotary_kernels();
}
#endif

}  // namespace ropewalk
