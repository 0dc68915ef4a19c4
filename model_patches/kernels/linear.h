// Products y = x Wᵀ with weights packed into panels, for any number of rows: what other operators may call.
//
// Weights are read once for every few hundred rows, so a few rows cost what reading them costs. A row's sums are taken in
// order of depth at every number of rows: its bits depend neither on what else is in the batch nor on the number of threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "linear_kernels.h"

namespace ropewalk {

// Adjacent panels that may be multiplied together, at most.
constexpr std::int64_t kMaxSpan = 2;

// A matrix [outputs, inputs] in panels of 32 outputs, see kPanelColumns.
struct PackedWeight {
  const char* data;
  Number number;         // float32 or bfloat16
  std::int64_t panels;   // outputs / 32, rounded up
  std::int64_t depth;    // inputs, rounded up to a multiple of kDepthStep; weights beyond them are 0

  std::int64_t panel_bytes() const { return depth * kPanelColumns * (number == Number::bfloat16 ? 2 : 4); }
};

// Rows that are multiplied: of the weight's number type, `stride` elements apart, and 0 from its inputs up to its depth.
// Memory up to a multiple of 16 rows must be readable.
struct Activations {
  const char* data;
  std::int64_t rows;
  std::int64_t stride;
};

// The loops of the best instruction set that may be used; `multiply_bfloat16` on AMX where there is one.
const LinearKernels& linear_kernels();

// Compute x Wᵀ in float32, 32 columns of some rows at a time, on torch's threads.
//
// `consume(row, rows, group, sums)` is called once for each block of at most 32 rows and each group of `span` adjacent
// panels, with sums [span, 32, 32]: the sum for row i and column j of panel s is sums[(s * 32 + i) * 32 + j]; it may write there.
template <typename Consume>
void multiply(const Activations& x, const PackedWeight& weight, std::int64_t span, const Consume& consume) {
  if (x.rows == 0) return;
  // Rows that stay in a core's cache while panels pass by.
  const std::int64_t chunk = std::clamp<std::int64_t>((1 << 18) / weight.depth, 2, 16) * kMultiplyRows;
  const std::int64_t chunks = (x.rows + chunk - 1) / chunk, groups = weight.panels / span;
  const std::int64_t element = weight.number == Number::bfloat16 ? 2 : 4;
  const LinearKernels& kernels = linear_kernels();
  const MultiplyBlock block = weight.number == Number::bfloat16 ? kernels.multiply_bfloat16 : kernels.multiply_float32;
  const std::int64_t work = weight.depth * kPanelColumns * span * std::min(x.rows, chunk);
  at::parallel_for(0, chunks * groups, std::max<std::int64_t>(1, (1 << 16) / work), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float sums[kMaxSpan * kMultiplyRows * kPanelColumns];
    if (kernels.open) kernels.open(std::min(x.rows, kMultiplyRows));
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t group = task % groups, first = task / groups * chunk, last = std::min(first + chunk, x.rows);
      for (std::int64_t row = first; row < last; row += kMultiplyRows) {
        const std::int64_t rows = std::min(kMultiplyRows, last - row);
        for (std::int64_t panel = 0; panel < span; ++panel)
          block(x.data + row * x.stride * element, x.stride, rows,
                weight.data + (group * span + panel) * weight.panel_bytes(), weight.depth,
                sums + panel * kMultiplyRows * kPanelColumns);
        consume(row, rows, group, static_cast<float*>(sums));
      }
    }
    if (kernels.close) kernels.close();
  });
}

// y [rows, outputs] = x Wᵀ + bias, rounded to `number` once. `bias` is null or has a number for every column of all panels;
// `stride` in elements of y.
void linear(const Activations& x, const PackedWeight& weight, const float* bias, std::int64_t outputs, Number number, void* y,
            std::int64_t stride);

}  // namespace ropewalk
