// The inner loops of small-row products, norms and gates, one set for each instruction set. Internal: other operators call
// linear.h.
#pragma once

#include "dispatch.h"

namespace ropewalk {

// Columns of y = x Wᵀ that lie together in memory, for every depth: of bfloat16 a panel is [depth / 2, 32, 2], which is what
// dot products of pairs and AMX tiles take, of float32 [depth, 32].
constexpr std::int64_t kPanelColumns = 32;
// Depth is padded with zeros to a multiple of this.
constexpr std::int64_t kDepthStep = 32;
// Rows of x that are multiplied with a panel in one call, at most.
constexpr std::int64_t kMultiplyRows = 32;
// How far ahead of the products weights are asked for: hardware does not look beyond a page of 4 KiB.
constexpr std::int64_t kPrefetchBytes = 4096;

// out [rows, 32] = x [rows, depth] times a panel; `stride` is from row to row of x, in elements. Summed in order of depth,
// whatever the number of rows.
using MultiplyBlock = void (*)(const void* x, std::int64_t stride, std::int64_t rows, const void* panel, std::int64_t depth,
                               float* out);

struct LinearKernels {
  // Before the first and after the last block in a thread, `rows` being the largest number in any block; may be null.
  void (*open)(std::int64_t rows);
  void (*close)();
  MultiplyBlock multiply_bfloat16;
  MultiplyBlock multiply_float32;
  // to [rows, columns] = silu(gate) * up, blocks of [rows, 32], in float32, rounded once; `stride` in elements of `to`.
  void (*silu_multiply)(const float* gate, const float* up, std::int64_t rows, std::int64_t columns, Number number, void* to,
                        std::int64_t stride);
  // to [size] = x / sqrt(mean(x * x) + epsilon) * weight, in float32, rounded once. `x` is float32 or bfloat16, `to` of
  // `number`.
  void (*rms_norm)(const void* x, Number x_number, const float* weight, std::int64_t size, float epsilon, Number number,
                   void* to);
  // to [size] = x rounded.
  void (*round)(const float* x, std::int64_t size, Number number, void* to);
  // sums [size] += x.
  void (*add)(const float* x, std::int64_t size, float* sums);
};

ROPEWALK_DECLARE_KERNELS(LinearKernels, linear_kernels)
#if defined(__x86_64__)
namespace amx {
// May this process use AMX tiles? Asks the operating system for them, once.
bool available();
void open(std::int64_t rows);
void close();
void multiply(const void* x, std::int64_t stride, std::int64_t rows, const void* panel, std::int64_t depth, float* out);
}  // namespace amx
#endif

}  // namespace ropewalk
