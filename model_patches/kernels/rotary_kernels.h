// The inner loops of rotation, one set for each instruction set. Internal: other operators call rotary.h.
#pragma once

#include "dispatch.h"

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

ROPEWALK_DECLARE_KERNELS(RotaryKernels, rotary_kernels)

}  // namespace ropewalk
