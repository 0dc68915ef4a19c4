// Loops over panels, norms and gates in vectors. Compiled once for each instruction set.
//
// Knows how weights lie in their panels. Does not know how many rows or panels there are, or threads.
#include "linear_kernels.h"
#include "simd.h"

namespace ropewalk::ROPEWALK_LEVEL {
namespace {

constexpr int kVectors = kPanelColumns / kWidth;
// Vectors of sums that fit into registers beside what is multiplied: those of kRows rows and kTile vectors of columns, or of
// fewer rows and all columns.
constexpr int kSums = kWidth == 16 ? 16 : kWidth == 8 ? 12 : 8;
constexpr int kTile = kWidth == 4 ? 4 : 2;
constexpr int kRows = kSums / kTile;
// Depth that sums are taken over before they are added up: a sum of sums errs less than one long sum.
constexpr std::int64_t kSummed = 64;

ROPEWALK_INLINE void prefetch(const void* panel, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(panel) + kPrefetchBytes + at);
}

// sums += x times some columns of a panel, at one depth of float32.
template <int Count, int Tile>
ROPEWALK_INLINE void add_products(const float* x, std::int64_t stride, const float* panel, std::int64_t depth,
                                  Floats (&sums)[Count][Tile]) {
  for (std::int64_t k = 0; k < depth; ++k, panel += kPanelColumns) {
    prefetch(panel, 4 * kWidth * Tile);
    Floats weights[Tile];
    ROPEWALK_UNROLL
    for (int v = 0; v < Tile; ++v) weights[v] = load(panel + kWidth * v);
    ROPEWALK_UNROLL
    for (int row = 0; row < Count; ++row) {
      const Floats value = all(x[row * stride + k]);
      ROPEWALK_UNROLL
      for (int v = 0; v < Tile; ++v) sums[row][v] += weights[v] * value;
    }
  }
}

// The same of bfloat16, whose depths lie in pairs.
template <int Count, int Tile>
ROPEWALK_INLINE void add_products(const float* x, std::int64_t stride, const std::uint16_t* panel, std::int64_t depth,
                                  Floats (&sums)[Count][Tile]) {
  for (std::int64_t k = 0; k < depth; k += 2, panel += 2 * kPanelColumns) {
    prefetch(panel, 4 * kWidth * Tile);
    ROPEWALK_UNROLL
    for (int second = 0; second < 2; ++second) {
      Floats weights[Tile];
      ROPEWALK_UNROLL
      for (int v = 0; v < Tile; ++v) {
        const Words pairs = load_vector<Words>(panel + 2 * kWidth * v);
        weights[v] = as_floats(second ? pairs & 0xffff0000u : pairs << 16);
      }
      ROPEWALK_UNROLL
      for (int row = 0; row < Count; ++row) {
        const Floats value = all(x[row * stride + k + second]);
        ROPEWALK_UNROLL
        for (int v = 0; v < Tile; ++v) sums[row][v] += weights[v] * value;
      }
    }
  }
}

// Rows as float32: they are themselves, or are written to `widened` [Count, kSummed].
template <int Count>
ROPEWALK_INLINE const float* as_float32(const float* x, std::int64_t, std::int64_t, float*) {
  return x;
}
template <int Count>
ROPEWALK_INLINE const float* as_float32(const std::uint16_t* x, std::int64_t stride, std::int64_t depth, float* widened) {
  for (int row = 0; row < Count; ++row)
    for (std::int64_t k = 0; k < depth; k += kWidth) store(widened + row * kSummed + k, load(x + row * stride + k));
  return widened;
}

template <int Count, typename Element>
void multiply(const Element* x, std::int64_t stride, const Element* panel, std::int64_t depth, float* out) {
  constexpr int kTiles = Count * kVectors <= kSums ? 1 : kVectors / kTile, kWide = kVectors / kTiles;
  constexpr std::int64_t kDepths = 4 / sizeof(Element);  // depths that lie side by side
  Floats totals[kTiles][Count][kWide] = {};
  alignas(64) float widened[Count * kSummed];
  for (std::int64_t begin = 0; begin < depth; begin += kSummed) {
    const std::int64_t length = begin + kSummed < depth ? kSummed : depth - begin;
    const float* const rows = as_float32<Count>(x + begin, stride, length, widened);
    const std::int64_t step = sizeof(Element) == 4 ? stride : kSummed;
    for (int tile = 0; tile < kTiles; ++tile) {
      Floats sums[Count][kWide] = {};
      add_products<Count, kWide>(rows, step, panel + kDepths * kWidth * kWide * tile, length, sums);
      for (int row = 0; row < Count; ++row)
        for (int v = 0; v < kWide; ++v) totals[tile][row][v] += sums[row][v];
    }
    panel += length * kPanelColumns;
  }
  for (int tile = 0; tile < kTiles; ++tile)
    for (int row = 0; row < Count; ++row)
      for (int v = 0; v < kWide; ++v) store(out + row * kPanelColumns + kWidth * (kWide * tile + v), totals[tile][row][v]);
}

#if defined(__AVX512BF16__)
template <int Count>
void multiply(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* panel, std::int64_t depth, float* out) {
  Floats sums[Count][kVectors] = {};
  for (std::int64_t k = 0; k < depth; k += 2, panel += 2 * kPanelColumns) {
    prefetch(panel, 4 * kPanelColumns);
    const __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + kPanelColumns);
#pragma GCC unroll 8
    for (int row = 0; row < Count; ++row) {
      int pair;
      __builtin_memcpy(&pair, x + row * stride + k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], low, both);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], high, both);
    }
  }
  for (int row = 0; row < Count; ++row)
    for (int v = 0; v < kVectors; ++v) store(out + row * kPanelColumns + kWidth * v, sums[row][v]);
}
#endif

template <typename Element, int Count>
void multiply_some(const Element* x, std::int64_t stride, std::int64_t rows, const Element* panel, std::int64_t depth,
                   float* out) {
  if constexpr (Count > 0) {
    if (rows == Count) return multiply<Count>(x, stride, panel, depth, out);
    multiply_some<Element, Count - 1>(x, stride, rows, panel, depth, out);
  }
}

template <typename Element>
void multiply_block(const void* x, std::int64_t stride, std::int64_t rows, const void* panel, std::int64_t depth, float* out) {
  const Element* row = static_cast<const Element*>(x);
  for (; rows > 0; rows -= kRows, row += kRows * stride, out += kRows * kPanelColumns)
    multiply_some<Element, kRows>(row, stride, rows < kRows ? rows : kRows, static_cast<const Element*>(panel), depth, out);
}

ROPEWALK_INLINE Floats silu(Floats x) {
  const Floats power = exp2_of((x < 0.f ? x : -x) * 1.44269504f);  // exp(-|x|)
  return x * (x < 0.f ? power : all(1.f)) / (1.f + power);
}

template <typename Element>
void silu_multiply_into(const float* gate, const float* up, std::int64_t rows, std::int64_t columns, Element* to,
                        std::int64_t stride) {
  for (std::int64_t row = 0; row < rows; ++row, to += stride, gate += kPanelColumns, up += kPanelColumns)
    for (std::int64_t column = 0; column < columns; column += kWidth)
      store_some(to + column, silu(load(gate + column)) * load(up + column), columns - column);
}

void silu_multiply(const float* gate, const float* up, std::int64_t rows, std::int64_t columns, Number number, void* to,
                   std::int64_t stride) {
  if (number == Number::bfloat16) return silu_multiply_into(gate, up, rows, columns, static_cast<std::uint16_t*>(to), stride);
  silu_multiply_into(gate, up, rows, columns, static_cast<float*>(to), stride);
}

template <typename From, typename To>
void rms_norm_into(const From* x, const float* weight, std::int64_t size, float epsilon, To* to) {
  Floats squares[4] = {};
  std::int64_t at = 0;
  for (; at + 4 * kWidth <= size; at += 4 * kWidth)
    for (int v = 0; v < 4; ++v) {
      const Floats values = load(x + at + kWidth * v);
      squares[v] += values * values;
    }
  for (; at < size; at += kWidth) {
    const Floats values = load_some(x + at, size - at);
    squares[0] += values * values;
  }
  const float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float scale = 1.f / __builtin_sqrtf(sum / static_cast<float>(size) + epsilon);
  for (at = 0; at < size; at += kWidth)
    store_some(to + at, load_some(x + at, size - at) * scale * load_some(weight + at, size - at), size - at);
}

template <typename From>
void rms_norm_from(const From* x, const float* weight, std::int64_t size, float epsilon, Number number, void* to) {
  if (number == Number::bfloat16) return rms_norm_into(x, weight, size, epsilon, static_cast<std::uint16_t*>(to));
  rms_norm_into(x, weight, size, epsilon, static_cast<float*>(to));
}

void rms_norm(const void* x, Number x_number, const float* weight, std::int64_t size, float epsilon, Number number, void* to) {
  if (x_number == Number::bfloat16)
    return rms_norm_from(static_cast<const std::uint16_t*>(x), weight, size, epsilon, number, to);
  rms_norm_from(static_cast<const float*>(x), weight, size, epsilon, number, to);
}

template <typename Element>
void round_into(const float* x, std::int64_t size, Element* to) {
  for (std::int64_t at = 0; at < size; at += kWidth) store_some(to + at, load_some(x + at, size - at), size - at);
}

void round(const float* x, std::int64_t size, Number number, void* to) {
  if (number == Number::bfloat16) return round_into(x, size, static_cast<std::uint16_t*>(to));
  round_into(x, size, static_cast<float*>(to));
}

void add(const float* x, std::int64_t size, float* sums) {
  for (std::int64_t at = 0; at < size; at += kWidth)
    store_some(sums + at, load_some(sums + at, size - at) + load_some(x + at, size - at), size - at);
}

}  // namespace

const LinearKernels& linear_kernels() {
  static const LinearKernels kernels{nullptr,       nullptr,  multiply_block<std::uint16_t>, multiply_block<float>,
                                     silu_multiply, rms_norm, round,                         add};
  return kernels;
}

}  // namespace ropewalk::ROPEWALK_LEVEL
