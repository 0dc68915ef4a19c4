// The inner loops of attention for one instruction set. Compiled once for each; see build.py.
#include "attention_kernels.h"

#include "simd.h"

namespace ropewalk::ROPEWALK_LEVEL {
namespace {

using Int = std::int64_t;
using Half = std::uint16_t;  // bfloat16 bits

constexpr float kLog2e = 1.44269504f;
constexpr float kMinusInf = -__builtin_inff();
// Columns of a matrix product come in multiples of this, so that there are few shapes; what is beyond the end is zero.
constexpr Int kColumns = 64;
// Rows of products by oneDNN likewise.
constexpr Int kTileRows = 16;
// Apart from each other by a power of two, rows of a matrix would share few lines of the first-level cache.
constexpr Int kGap = 16;
// Rows whose logits are held at a time, about, so that they stay in the second-level cache.
constexpr Int kPartRows = 128;
constexpr int kRowsAtOnce = 4;
constexpr Int kKeysAtOnce = 32;

ROPEWALK_INLINE Int lesser(Int a, Int b) { return a < b ? a : b; }
ROPEWALK_INLINE Int greater(Int a, Int b) { return a > b ? a : b; }
ROPEWALK_INLINE Int round_up(Int number, Int multiple) { return (number + multiple - 1) / multiple * multiple; }

// Rows of whole tokens whose logits are held at a time.
ROPEWALK_INLINE Int part_rows(Int group) { return greater(1, kPartRows / group) * group; }

// Whether matrices are multiplied in bfloat16.
#if defined(__AVX512BF16__)
constexpr bool kHalfProducts = true;
#else
constexpr bool kHalfProducts = false;
#endif

ROPEWALK_INLINE float scale_of(const PagedRows& pages, Int row) {
  // float16 bits: moved into float32's places and its exponent's bias made good, which holds for subnormal numbers too.
  const Half bits = pages.scales[row];
  const std::uint32_t moved = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  float number;
  __builtin_memcpy(&number, &moved, sizeof number);
  return number * 5.192296858534828e33f;  // 2^112
}

// Where things lie in scratch memory. Sizes are in units of four bytes and multiples of 64 bytes.
struct Scratch {
  Int key_dim;       // padded
  Int value_dim;     // padded
  Int query_stride;  // of a row of queries as float32, in elements
  Int value_stride;
  float* queries;         // [rows, query_stride] float32, or as many bfloat16
  std::uint32_t* keys;    // [key_dim, kScoreStride]
  std::uint32_t* values;  // [kBlockKeys, value_stride]
  float* scores;          // [part of the rows, kScoreStride]
  Half* weights;          // [part of the rows, kWeightStride]
  Floats* sums;           // [kRowsAtOnce, kWidth]
  Int* places;            // [kBlockKeys], each key's row in the pages
  Int bytes;
};

constexpr Int kScoreStride = kBlockKeys + kGap;
constexpr Int kWeightStride = kBlockKeys + 2 * kGap;

Scratch scratch_at(void* memory, Int key_dim, Int value_dim, Int rows, Int group) {
  Scratch at{};
  // Rows of products by oneDNN are rounded up wherever a part of them begins.
  const Int held = round_up(lesser(rows, greater(kPartRows, group)), kTileRows);
  rows += kTileRows;
  at.key_dim = round_up(key_dim, 32);
  at.value_dim = round_up(value_dim, 16);
  at.query_stride = at.key_dim + kGap;
  at.value_stride = at.value_dim + kGap;
  char* next = static_cast<char*>(memory);
  const auto take = [&](Int bytes) __attribute__((always_inline)) {
    char* const here = next;
    next += round_up(bytes, 64);
    return here;
  };
  at.queries = reinterpret_cast<float*>(take(4 * rows * at.query_stride));
  at.sums = reinterpret_cast<Floats*>(take(4 * kRowsAtOnce * kWidth * kWidth));
  at.places = reinterpret_cast<Int*>(take(8 * kBlockKeys));
  at.scores = reinterpret_cast<float*>(take(4 * greater(held, kRowsAtOnce) * kScoreStride));
  at.weights = reinterpret_cast<Half*>(take(2 * held * kWeightStride));
  at.keys = reinterpret_cast<std::uint32_t*>(take(4 * at.key_dim * kScoreStride));
  at.values = reinterpret_cast<std::uint32_t*>(take(4 * kBlockKeys * at.value_stride));
  at.bytes = next - static_cast<char*>(memory);
  return at;
}

Int scratch_bytes(Int key_dim, Int value_dim, Int rows, Int group) {
  return scratch_at(nullptr, key_dim, value_dim, rows, group).bytes;
}

// ---- queries ----

// Whether many rows of queries are multiplied with keys as pairs of bfloat16.
ROPEWALK_INLINE bool pairs_blocked(const Rows& query) { return kHalfProducts && query.number == Number::bfloat16; }

// Whether a few rows are.
ROPEWALK_INLINE bool pairs_in_place(const Rows& query, const PagedRows& keys) {
  return kHalfProducts && query.number == Number::bfloat16 && keys.number == Number::bfloat16;
}

template <typename Element>
void take_row(const Element* from, Int dim, Int padded, float* to) {
  for (Int i = 0; i < padded; i += kWidth) store(to + i, i < dim ? load_some(from + i, dim - i) : Floats{});
}

void take_row(const Half* from, Int dim, Int padded, Half* to) {
  __builtin_memcpy(to, from, dim * sizeof(Half));
  __builtin_memset(to + dim, 0, (padded - dim) * sizeof(Half));
}

void take_queries(const QueryRows& rows, const KeyBlock& block, bool blocked, void* memory) {
  const Rows& query = *rows.query;
  const bool as_pairs = blocked ? pairs_blocked(query) : pairs_in_place(query, *block.keys);
  const Scratch at = scratch_at(memory, query.dim, block.values->dim, rows.rows, rows.group);
  for (Int row = 0; row < rows.rows; ++row) {
    const Int offset = (rows.first_token + row / rows.group) * query.token_stride +
                       (rows.first_head + row % rows.group) * query.head_stride;
    if (query.number == Number::float32) {
      take_row(static_cast<const float*>(query.data) + offset, query.dim, at.key_dim,
               at.queries + row * at.query_stride);
    } else if (!as_pairs) {
      take_row(static_cast<const Half*>(query.data) + offset, query.dim, at.key_dim,
               at.queries + row * at.query_stride);
    } else {
      take_row(static_cast<const Half*>(query.data) + offset, query.dim, at.key_dim,
               reinterpret_cast<Half*>(at.queries) + row * at.query_stride * 2);
    }
  }
}

// ---- what both ways share: the softmax of a row's logits over one block ----

// The columns of a block that a row sees, [begin, end); end <= begin if it sees none.
struct Columns {
  Int begin;
  Int end;
};

ROPEWALK_INLINE Columns seen_by(Int position, const KeyBlock& block, Int window) {
  const Int first = window ? greater(position - window + 1, block.begin) : block.begin;
  return {first - block.begin, lesser(position + 1, block.end) - block.begin};
}

ROPEWALK_INLINE Int position_of(const QueryRows& rows, Int row) { return rows.first_position + row / rows.group; }

// The columns that any of the rows sees.
ROPEWALK_INLINE Columns seen_by_any(const QueryRows& rows, const KeyBlock& block, Int window) {
  return {seen_by(position_of(rows, 0), block, window).begin,
          seen_by(position_of(rows, rows.rows - 1), block, window).end};
}

ROPEWALK_INLINE Ints within(Int column, Columns seen) {
  const Ints numbers = lanes() + static_cast<std::int32_t>(column);
  return (numbers >= static_cast<std::int32_t>(seen.begin)) & (numbers < static_cast<std::int32_t>(seen.end));
}

ROPEWALK_INLINE Floats tanh_of(Floats x) {
  const Floats size = larger(x, -x);
  const Floats power = exp2_of(size * (-2.f * kLog2e));
  const Floats small = x * (1.f - x * x * (1.f / 3.f));  // the other form loses digits near 0
  const Floats large = (1.f - power) / (1.f + power);
  return size < 0.04f ? small : x < 0.f ? -large : large;
}

// Products → logits for what a factor alone does not do.
void apply_rules(float* scores, Int begin, Int end, float distance, const LogitRules& rules, float slope) {
  const float inverse = rules.soft_cap ? rules.scale / rules.soft_cap : 0.f;
  for (Int column = begin; column < end; column += kWidth) {
    Floats logits = load(scores + column);
    logits = rules.soft_cap ? tanh_of(logits * inverse) * rules.soft_cap : logits * rules.scale;
    const Floats columns = __builtin_convertvector(lanes() + static_cast<std::int32_t>(column), Floats);
    store(scores + column, logits + slope * (columns + distance));
  }
}

// Softmax weights of one row.
//
// Args: scores [end] products; columns from `begin` to `end`, both multiples of kWidth, are written: outside of `seen`
// with 0. `weights` may be `scores`. Peak and total as in Partial.
template <typename Weight>
void weigh(float* scores, Weight* weights, Int begin, Int end, Columns seen, const LogitRules& rules, float slope,
           Int distance, float* peak, float* total) {
  float scale = rules.scale;
  if (rules.soft_cap != 0.f || rules.slopes) {
    apply_rules(scores, begin, end, static_cast<float>(distance), rules, slope);
    scale = 1.f;
  }
  const Int inner_begin = greater(begin, round_up(seen.begin, kWidth));
  const Int inner_end = lesser(end, seen.end / kWidth * kWidth);
  Floats largest = all(kMinusInf);
  const auto take_masked = [&](Int column) __attribute__((always_inline)) {
    const Floats logits = within(column, seen) ? load(scores + column) : all(kMinusInf);
    store(scores + column, logits);
    largest = larger(largest, logits);
  };
  for (Int column = begin; column < lesser(inner_begin, end); column += kWidth) take_masked(column);
  Floats others = all(kMinusInf);
  Int column = inner_begin;
  for (; column + kWidth < inner_end; column += 2 * kWidth) {
    largest = larger(largest, load(scores + column));
    others = larger(others, load(scores + column + kWidth));
  }
  for (; column < inner_end; column += kWidth) largest = larger(largest, load(scores + column));
  for (column = greater(inner_begin, inner_end); column < end; column += kWidth) take_masked(column);
  const float top = largest_of(larger(largest, others));
  if (top == kMinusInf) {
    for (column = begin; column < end; column += kWidth) store(weights + column, Floats{});
    *peak = kMinusInf;
    *total = 0.f;
    return;
  }
  // Two sums, by the column's place in the block, so that where a caller begins does not matter.
  Floats sums[2] = {};
  const float factor = scale * kLog2e;
  for (column = begin; column < end; column += kWidth) {
    const Floats weight = exp2_of((load(scores + column) - top) * factor);
    store(weights + column, weight);
    sums[(column / kWidth) & 1] += weight;
  }
  *peak = top * scale;
  *total = sum_of(sums[0] + sums[1]);
}

ROPEWALK_INLINE float slope_of(const QueryRows& rows, const LogitRules& rules, Int row) {
  return rules.slopes ? rules.slopes[rows.first_head + row % rows.group] : 0.f;
}

// Each key's row in the pages.
void find_places(const KeyBlock& block, Columns columns, Int* places) {
  const Int page_size = block.keys->page_size, heads = block.keys->heads;
  Int page = (block.begin + columns.begin) / page_size, offset = (block.begin + columns.begin) % page_size;
  for (Int column = columns.begin; column < columns.end; ++column) {
    places[column] = (block.pages[page] * page_size + offset) * heads + block.head;
    if (++offset == page_size) {
      offset = 0;
      ++page;
    }
  }
}

// ---- a few rows ----

// Products of queries with keys in place, kWidth keys at a time.
struct FloatKeys {
  template <int Count, typename Element>
  static ROPEWALK_INLINE void dots(const float* queries, Int stride, const Element* key, Int dim,
                                   Floats (&sums)[Count]) {
    Int i = 0;
    for (; i + kWidth <= dim; i += kWidth) {
      const Floats part = load(key + i);
      ROPEWALK_UNROLL
      for (int row = 0; row < Count; ++row) sums[row] += load(queries + row * stride + i) * part;
    }
    if (i < dim) {
      const Floats part = load_some(key + i, dim - i);
      ROPEWALK_UNROLL
      for (int row = 0; row < Count; ++row) sums[row] += load(queries + row * stride + i) * part;
    }
  }
};

#if defined(__AVX512BF16__)
struct HalfKeys {
  template <int Count, typename Element>
  static ROPEWALK_INLINE void dots(const float* queries, Int stride, const Element* key, Int dim,
                                   Floats (&sums)[Count]) {
    const char* const rows = reinterpret_cast<const char*>(queries);
    Int i = 0;
    for (; i + 32 <= dim; i += 32) {
      const __m512bh part = load_vector<__m512bh>(key + i);
      ROPEWALK_UNROLL
      for (int row = 0; row < Count; ++row)
        sums[row] = _mm512_dpbf16_ps(sums[row], load_vector<__m512bh>(rows + 4 * row * stride + 2 * i), part);
    }
    if (i < dim) {
      Element numbers[32] = {};
      for (Int rest = 0; rest < dim - i; ++rest) numbers[rest] = key[i + rest];
      const __m512bh part = load_vector<__m512bh>(numbers);
      ROPEWALK_UNROLL
      for (int row = 0; row < Count; ++row)
        sums[row] = _mm512_dpbf16_ps(sums[row], load_vector<__m512bh>(rows + 4 * row * stride + 2 * i), part);
    }
  }
};
#else
using HalfKeys = FloatKeys;
#endif

template <int Count, typename Dots, typename Element>
void score_in_place(const float* queries, Int stride, const PagedRows& keys, const Int* places, Columns columns,
                    Floats* sums, float* scores) {
  const Element* const data = static_cast<const Element*>(keys.data);
  const Int dim = keys.dim, last = columns.end - 1;
  for (Int begin = columns.begin / kWidth * kWidth; begin < columns.end; begin += kWidth) {
    ROPEWALK_UNROLL
    for (int lane = 0; lane < kWidth; ++lane) {
      const Int column = lesser(greater(begin + lane, columns.begin), last);
      __builtin_prefetch(data + places[lesser(column + kKeysAtOnce, last)] * dim);
      __builtin_prefetch(data + places[lesser(column + kKeysAtOnce, last)] * dim + 64 / sizeof(Element));
      Floats products[Count] = {};
      Dots::template dots<Count>(queries, stride, data + places[column] * dim, dim, products);
      ROPEWALK_UNROLL
      for (int row = 0; row < Count; ++row) sums[row * kWidth + lane] = products[row];
    }
    Floats factor = all(1.f);
    if constexpr (sizeof(Element) == 1) {
      ROPEWALK_UNROLL
      for (int lane = 0; lane < kWidth; ++lane)
        factor[lane] = scale_of(keys, places[lesser(greater(begin + lane, columns.begin), last)]);
    }
    ROPEWALK_UNROLL
    for (int row = 0; row < Count; ++row)
      store(scores + row * kScoreStride + begin, sums_of(sums + row * kWidth) * factor);
  }
}

// Some vectors of a head's dimensions for some rows: values += weights times the values in place.
template <int Count, int Vectors, bool Whole, typename Element>
ROPEWALK_INLINE void gather_values(const float* weights, const Element* data, const Int* places, Int dim, Int first,
                                   Columns columns, float* values, Int stride) {
  Floats sums[Count][Vectors];
  ROPEWALK_UNROLL
  for (int row = 0; row < Count; ++row) ROPEWALK_UNROLL
  for (int part = 0; part < Vectors; ++part) sums[row][part] = load(values + row * stride + first + part * kWidth);
  for (Int column = columns.begin; column < columns.end; ++column) {
    const Element* const value = data + places[column] * dim + first;
    Floats parts[Vectors];
    ROPEWALK_UNROLL
    for (int part = 0; part < Vectors; ++part)
      parts[part] = Whole ? load(value + part * kWidth) : load_some(value + part * kWidth, dim - first - part * kWidth);
    ROPEWALK_UNROLL
    for (int row = 0; row < Count; ++row) {
      const float weight = weights[row * kScoreStride + column];
      ROPEWALK_UNROLL
      for (int part = 0; part < Vectors; ++part) sums[row][part] += weight * parts[part];
    }
  }
  ROPEWALK_UNROLL
  for (int row = 0; row < Count; ++row) ROPEWALK_UNROLL
  for (int part = 0; part < Vectors; ++part) store(values + row * stride + first + part * kWidth, sums[row][part]);
}

template <int Count, typename Element>
void value_in_place(const float* weights, const PagedRows& pages, const Int* places, Columns columns, float* values,
                    Int stride) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;
  const Element* const data = static_cast<const Element*>(pages.data);
  const Int dim = pages.dim;
  ROPEWALK_UNROLL
  for (int row = 0; row < Count; ++row) __builtin_memset(values + row * stride, 0, round_up(dim, 16) * sizeof(float));
  for (Int begin = columns.begin; begin < columns.end; begin += kKeysAtOnce) {
    const Columns some{begin, lesser(begin + kKeysAtOnce, columns.end)};
    for (Int ahead = some.end; ahead < lesser(some.end + kKeysAtOnce, columns.end); ++ahead) {
      __builtin_prefetch(data + places[ahead] * dim);
      __builtin_prefetch(data + places[ahead] * dim + 64 / sizeof(Element));
    }
    Int first = 0;
    for (; first + kVectors * kWidth <= dim; first += kVectors * kWidth)
      gather_values<Count, kVectors, true>(weights, data, places, dim, first, some, values, stride);
    for (; first + kWidth <= dim; first += kWidth)
      gather_values<Count, 1, true>(weights, data, places, dim, first, some, values, stride);
    if (first < dim) gather_values<Count, 1, false>(weights, data, places, dim, first, some, values, stride);
  }
}

// Up to kRowsAtOnce rows, from row `first`.
template <int Count>
void attend_some(const QueryRows& rows, Int first, const KeyBlock& block, Columns columns, const LogitRules& rules,
                 const Scratch& at, const Partial& result) {
  const float* const queries = at.queries + first * at.query_stride;
  float* const scores = at.scores;
  const PagedRows& keys = *block.keys;
  switch (keys.number) {
    case Number::float32:
      score_in_place<Count, FloatKeys, float>(queries, at.query_stride, keys, at.places, columns, at.sums, scores);
      break;
    case Number::int8:
      score_in_place<Count, FloatKeys, std::int8_t>(queries, at.query_stride, keys, at.places, columns, at.sums,
                                                    scores);
      break;
    case Number::bfloat16:
      if (pairs_in_place(*rows.query, keys))
        score_in_place<Count, HalfKeys, Half>(queries, at.query_stride, keys, at.places, columns, at.sums, scores);
      else
        score_in_place<Count, FloatKeys, Half>(queries, at.query_stride, keys, at.places, columns, at.sums, scores);
  }
  const Int begin = columns.begin / kWidth * kWidth, end = round_up(columns.end, kWidth);
  ROPEWALK_UNROLL
  for (int row = 0; row < Count; ++row) {
    const Int position = position_of(rows, first + row);
    float* const logits = scores + row * kScoreStride;
    weigh(logits, logits, begin, end, seen_by(position, block, rules.window), rules, slope_of(rows, rules, first + row),
          block.begin - position, result.peaks + first + row, result.totals + first + row);
  }
  const PagedRows& pages = *block.values;
  float* const values = result.values + first * result.stride;
  switch (pages.number) {
    case Number::float32:
      return value_in_place<Count, float>(scores, pages, at.places, columns, values, result.stride);
    case Number::bfloat16:
      return value_in_place<Count, Half>(scores, pages, at.places, columns, values, result.stride);
    case Number::int8:
      for (Int column = columns.begin; column < columns.end; ++column) {
        const float scale = scale_of(pages, at.places[column]);
        ROPEWALK_UNROLL
        for (int row = 0; row < Count; ++row) scores[row * kScoreStride + column] *= scale;
      }
      return value_in_place<Count, std::int8_t>(scores, pages, at.places, columns, values, result.stride);
  }
}

void attend_in_place(const QueryRows& rows, const KeyBlock& block, const LogitRules& rules, void* memory,
                     const Partial& result) {
  const Scratch at = scratch_at(memory, block.keys->dim, block.values->dim, rows.rows, rows.group);
  const Columns columns = seen_by_any(rows, block, rules.window);
  find_places(block, columns, at.places);
  Int row = 0;
  for (; row + kRowsAtOnce <= rows.rows; row += kRowsAtOnce)
    attend_some<kRowsAtOnce>(rows, row, block, columns, rules, at, result);
  switch (rows.rows - row) {
    case 3:
      return attend_some<3>(rows, row, block, columns, rules, at, result);
    case 2:
      return attend_some<2>(rows, row, block, columns, rules, at, result);
    case 1:
      return attend_some<1>(rows, row, block, columns, rules, at, result);
  }
}

// ---- many rows ----

// One row of pages as the words of a matrix: numbers as float32, or pairs of them as bfloat16.
template <bool AsPairs, typename Element>
ROPEWALK_INLINE Words words_of(const Element* row, Int count, float scale) {
  if constexpr (!AsPairs) {
    Floats numbers = load_some(row, count);
    if constexpr (sizeof(Element) == 1) numbers *= scale;
    return as_words(numbers);
  } else if constexpr (sizeof(Element) == 2) {
    if (count >= 2 * kWidth) return load_vector<Words>(row);
    Half numbers[2 * kWidth] = {};
    for (Int i = 0; i < count; ++i) numbers[i] = row[i];
    return load_vector<Words>(numbers);
  } else {
    Half numbers[2 * kWidth];
    Floats low = load_some(row, count), high = count > kWidth ? load_some(row + kWidth, count - kWidth) : Floats{};
    if constexpr (sizeof(Element) == 1) {
      low *= scale;
      high *= scale;
    }
    store(numbers, low);
    store(numbers + kWidth, high);
    return load_vector<Words>(numbers);
  }
}

template <int Step>
ROPEWALK_INLINE void exchange(Words* rows) {
  Ints first{}, second{};
  ROPEWALK_UNROLL
  for (int lane = 0; lane < kWidth; ++lane) {
    first[lane] = (lane & Step) ? kWidth + (lane ^ Step) : lane;
    second[lane] = (lane & Step) ? kWidth + lane : (lane ^ Step);
  }
  ROPEWALK_UNROLL
  for (int row = 0; row < kWidth; ++row) {
    if (row & Step) continue;
    const Words low = rows[row], high = rows[row | Step];
    rows[row] = __builtin_shuffle(low, high, first);
    rows[row | Step] = __builtin_shuffle(low, high, second);
  }
}

ROPEWALK_INLINE void transpose(Words* rows) {
  exchange<1>(rows);
  exchange<2>(rows);
  if constexpr (kWidth > 4) exchange<4>(rows);
  if constexpr (kWidth > 8) exchange<8>(rows);
}

// Keys as columns of a matrix: [padded key_dim (/ 2 as pairs), kScoreStride] words.
template <bool AsPairs, typename Element>
void take_keys(const PagedRows& pages, const Int* places, Columns columns, Int end, Int padded, std::uint32_t* to) {
  constexpr Int kStep = AsPairs ? 2 * kWidth : kWidth;
  const Element* const data = static_cast<const Element*>(pages.data);
  const Int dim = pages.dim;
  for (Int begin = columns.begin / kColumns * kColumns; begin < end; begin += kWidth) {
    const bool all_there = begin >= columns.begin && begin + kWidth <= columns.end;
    for (Int first = 0; first < padded; first += kStep) {
      const bool inside = all_there && first + kStep <= dim;
      Words rows[kWidth];
      ROPEWALK_UNROLL
      for (int lane = 0; lane < kWidth; ++lane) {
        const Int column = begin + lane;
        const bool there = inside || (column >= columns.begin && column < columns.end && first < dim);
        rows[lane] = there ? words_of<AsPairs>(data + places[column] * dim + first, dim - first,
                                               sizeof(Element) == 1 ? scale_of(pages, places[column]) : 1.f)
                           : Words{};
      }
      transpose(rows);
      ROPEWALK_UNROLL
      for (int word = 0; word < kWidth; ++word)
        store_vector(to + (first / (AsPairs ? 2 : 1) + word) * kScoreStride + begin, rows[word]);
    }
  }
}

// A value's row as float32 or zeros where there is none.
template <typename Element>
ROPEWALK_INLINE Floats some_values(const PagedRows& pages, const Int* places, Columns columns, Int column, Int first) {
  if (column < columns.begin || column >= columns.end || first >= pages.dim) return Floats{};
  const Floats numbers =
      load_some(static_cast<const Element*>(pages.data) + places[column] * pages.dim + first, pages.dim - first);
  return sizeof(Element) == 1 ? numbers * scale_of(pages, places[column]) : numbers;
}

// Rows 2i and 2i + 1 of bfloat16 → pairs, `dim` of them, which is a multiple of 2 * kWidth.
ROPEWALK_INLINE void pair_up(const Half* low, const Half* high, Int dim, std::uint32_t* to) {
  typedef Half Row __attribute__((vector_size(4 * kWidth)));
  Row first{}, second{};
  ROPEWALK_UNROLL
  for (int i = 0; i < 2 * kWidth; ++i) {
    first[i] = i / 2 + (i % 2 ? 2 * kWidth : 0);
    second[i] = first[i] + kWidth;
  }
  for (Int i = 0; i < dim; i += 2 * kWidth) {
    const Row a = load_vector<Row>(low + i), b = load_vector<Row>(high + i);
    store_vector(to + i, __builtin_shuffle(a, b, first));
    store_vector(to + i + kWidth, __builtin_shuffle(a, b, second));
  }
}

// Values as rows of a matrix, or as rows of pairs from two of them: [kBlockKeys (/ 2 as pairs), stride] words.
template <bool AsPairs, typename Element>
void take_values(const PagedRows& pages, const Int* places, Columns columns, Int end, Int padded, Int stride,
                 std::uint32_t* to) {
  for (Int column = columns.begin / kColumns * kColumns; column < end; column += AsPairs ? 2 : 1) {
    if constexpr (AsPairs && sizeof(Element) == 2) {
      if (column >= columns.begin && column + 1 < columns.end && padded == pages.dim && padded % (2 * kWidth) == 0) {
        const Half* const data = static_cast<const Half*>(pages.data);
        pair_up(data + places[column] * padded, data + places[column + 1] * padded, padded, to + column / 2 * stride);
        continue;
      }
    }
    for (Int first = 0; first < padded; first += kWidth) {
      const Floats low = some_values<Element>(pages, places, columns, column, first);
      if constexpr (AsPairs) {
        const Floats high = some_values<Element>(pages, places, columns, column + 1, first);
        const Words pairs = words_from(narrow(low)) | (words_from(narrow(high)) << 16);
        store_vector(to + column / 2 * stride + first, pairs);
      } else {
        store(reinterpret_cast<float*>(to) + column * stride + first, low);
      }
    }
  }
}

#if defined(__AVX512F__)
constexpr int kTileHeight = 6, kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kTileHeight = 6, kTileVectors = 2;
#else
constexpr int kTileHeight = 4, kTileVectors = 2;
#endif

// sums += a (times) b for each lane: one product, or the two of a pair.
template <bool AsPairs>
ROPEWALK_INLINE Floats multiply_add(Floats sums, std::uint32_t a, Floats b) {
#if defined(__AVX512BF16__)
  if constexpr (AsPairs) return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
#endif
  float factor;
  __builtin_memcpy(&factor, &a, sizeof factor);
  return sums + factor * b;
}

template <bool AsPairs, int Height, int Vectors>
ROPEWALK_INLINE void multiply_tile(Int depth, Int stride_a, Int stride_b, Int stride_c, const std::uint32_t* a,
                                   const std::uint32_t* b, float* c) {
  Floats sums[Height][Vectors] = {};
  for (Int step = 0; step < depth; ++step) {
    Floats parts[Vectors];
    ROPEWALK_UNROLL
    for (int part = 0; part < Vectors; ++part) parts[part] = load_vector<Floats>(b + step * stride_b + part * kWidth);
    ROPEWALK_UNROLL
    for (int row = 0; row < Height; ++row) ROPEWALK_UNROLL
    for (int part = 0; part < Vectors; ++part)
      sums[row][part] = multiply_add<AsPairs>(sums[row][part], a[row * stride_a + step], parts[part]);
  }
  ROPEWALK_UNROLL
  for (int row = 0; row < Height; ++row) ROPEWALK_UNROLL
  for (int part = 0; part < Vectors; ++part) store(c + row * stride_c + part * kWidth, sums[row][part]);
}

template <bool AsPairs, int Height>
void multiply_rows(Int columns, Int depth, Int stride_a, Int stride_b, Int stride_c, const std::uint32_t* a,
                   const std::uint32_t* b, float* c) {
  constexpr Int kTile = kTileVectors * kWidth;
  Int column = 0;
  for (; column + kTile <= columns; column += kTile)
    multiply_tile<AsPairs, Height, kTileVectors>(depth, stride_a, stride_b, stride_c, a, b + column, c + column);
  for (; column < columns; column += kWidth)
    multiply_tile<AsPairs, Height, 1>(depth, stride_a, stride_b, stride_c, a, b + column, c + column);
}

// C [rows, columns] = A [rows, depth] B [depth, columns] in words: depth counts pairs where words are pairs; columns is
// a multiple of kWidth. Each number is summed in the order of depth, whatever the sizes.
template <bool AsPairs>
void multiply(Int rows, Int columns, Int depth, Int stride_a, Int stride_b, Int stride_c, const std::uint32_t* a,
              const std::uint32_t* b, float* c) {
  Int row = 0;
  for (; row + kTileHeight <= rows; row += kTileHeight)
    multiply_rows<AsPairs, kTileHeight>(columns, depth, stride_a, stride_b, stride_c, a + row * stride_a, b,
                                        c + row * stride_c);
  for (; row < rows; ++row)
    multiply_rows<AsPairs, 1>(columns, depth, stride_a, stride_b, stride_c, a + row * stride_a, b, c + row * stride_c);
}

template <bool AsPairs, typename Element>
void take_block(const KeyBlock& block, const Scratch& at, Columns columns, Int end) {
  take_keys<AsPairs, Element>(*block.keys, at.places, columns, end, at.key_dim, at.keys);
  take_values<AsPairs, Element>(*block.values, at.places, columns, end, at.value_dim, at.value_stride, at.values);
}

template <bool AsPairs>
void take_block(const KeyBlock& block, const Scratch& at, Columns columns, Int end) {
  switch (block.keys->number) {
    case Number::float32:
      return take_block<AsPairs, float>(block, at, columns, end);
    case Number::bfloat16:
      return take_block<AsPairs, Half>(block, at, columns, end);
    case Number::int8:
      return take_block<AsPairs, std::int8_t>(block, at, columns, end);
  }
}

// Softmax weights of all rows, [rows, stride] of them.
template <typename Weight>
void weigh_all(const QueryRows& rows, const KeyBlock& block, const LogitRules& rules, const Scratch& at, Int begin,
               Int end, Weight* weights, Int stride, const Partial& result) {
  for (Int row = 0; row < rows.rows; ++row) {
    const Int position = position_of(rows, row);
    weigh(at.scores + row * kScoreStride, weights + row * stride, begin, end, seen_by(position, block, rules.window),
          rules, slope_of(rows, rules, row), block.begin - position, result.peaks + row, result.totals + row);
  }
}

// Some of the rows, whole tokens from row `first`, over a block whose keys and values are copied already.
template <bool AsPairs>
void attend_part(const QueryRows& all_rows, Int first, Int some, const KeyBlock& block, const LogitRules& rules,
                 Product product, const Scratch& at, const Partial& all_results) {
  QueryRows rows = all_rows;
  rows.first_token += first / rows.group;
  rows.first_position += first / rows.group;
  rows.rows = some;
  const Int stride = all_results.stride;
  const Partial result{all_results.peaks + first, all_results.totals + first, all_results.values + first * stride,
                       stride};
  const Columns columns = seen_by_any(rows, block, rules.window);
  if (columns.begin >= columns.end) {
    for (Int row = 0; row < some; ++row) {
      result.peaks[row] = kMinusInf;
      result.totals[row] = 0.f;
    }
    __builtin_memset(result.values, 0, some * stride * sizeof(float));
    return;
  }
  const Int begin = columns.begin / kColumns * kColumns, end = round_up(columns.end, kColumns), count = end - begin;
  const auto* const queries = reinterpret_cast<const std::uint32_t*>(at.queries + first * at.query_stride);
  const std::uint32_t* const values = at.values + begin / (AsPairs ? 2 : 1) * at.value_stride;
  const Int many = round_up(rows.rows, kTileRows);
  if constexpr (AsPairs) {
    if (product) {
      product(many, count, at.key_dim, 2 * at.query_stride, kScoreStride, kScoreStride,
              reinterpret_cast<const Half*>(queries), reinterpret_cast<const Half*>(at.keys + begin),
              at.scores + begin);
    } else {
      multiply<true>(rows.rows, count, at.key_dim / 2, at.query_stride, kScoreStride, kScoreStride, queries,
                     at.keys + begin, at.scores + begin);
    }
    weigh_all(rows, block, rules, at, begin, end, at.weights, kWeightStride, result);
    if (product) {
      product(many, at.value_dim, count, kWeightStride, at.value_stride, result.stride, at.weights + begin,
              reinterpret_cast<const Half*>(values), result.values);
    } else {
      multiply<true>(rows.rows, at.value_dim, count / 2, kWeightStride / 2, at.value_stride, result.stride,
                     reinterpret_cast<const std::uint32_t*>(at.weights + begin), values, result.values);
    }
  } else {
    multiply<false>(rows.rows, count, at.key_dim, at.query_stride, kScoreStride, kScoreStride, queries, at.keys + begin,
                    at.scores + begin);
    weigh_all(rows, block, rules, at, begin, end, at.scores, kScoreStride, result);
    multiply<false>(rows.rows, at.value_dim, count, kScoreStride, at.value_stride, result.stride,
                    reinterpret_cast<const std::uint32_t*>(at.scores + begin), values, result.values);
  }
}

template <bool AsPairs>
void attend_parts(const QueryRows& rows, const KeyBlock& block, const LogitRules& rules, Product product,
                  const Scratch& at, const Partial& result) {
  const Columns columns = seen_by_any(rows, block, rules.window);
  find_places(block, columns, at.places);
  take_block<AsPairs>(block, at, columns, round_up(columns.end, kColumns));
  const Int most = part_rows(rows.group);
  for (Int first = 0; first < rows.rows; first += most)
    attend_part<AsPairs>(rows, first, lesser(most, rows.rows - first), block, rules, product, at, result);
}

void attend_blocked(const QueryRows& rows, const KeyBlock& block, const LogitRules& rules, Product product,
                    void* memory, const Partial& result) {
  const Scratch at = scratch_at(memory, block.keys->dim, block.values->dim, rows.rows, rows.group);
  if (pairs_blocked(*rows.query))
    attend_parts<kHalfProducts>(rows, block, rules, product, at, result);
  else
    attend_parts<false>(rows, block, rules, product, at, result);
}

// ---- blocks put together ----

ROPEWALK_INLINE float exp_of(float x) { return exp2_of(all(x * kLog2e))[0]; }

void merge(Int rows, Int dim, const Partial& next, const Partial& so_far) {
  for (Int row = 0; row < rows; ++row) {
    if (next.peaks[row] == kMinusInf) continue;
    const float peak = so_far.peaks[row] > next.peaks[row] ? so_far.peaks[row] : next.peaks[row];
    const float kept = exp_of(so_far.peaks[row] - peak), added = exp_of(next.peaks[row] - peak);
    so_far.peaks[row] = peak;
    so_far.totals[row] = so_far.totals[row] * kept + next.totals[row] * added;
    float* const to = so_far.values + row * so_far.stride;
    const float* const from = next.values + row * next.stride;
    for (Int i = 0; i < round_up(dim, 16); i += kWidth) store(to + i, load(to + i) * kept + load(from + i) * added);
  }
}

template <typename Element>
void finish_row(const float* values, Int dim, float factor, Element* to) {
  for (Int i = 0; i < dim; i += kWidth) store_some(to + i, load(values + i) * factor, dim - i);
}

void finish(const QueryRows& rows, const LogitRules& rules, const Partial& result, const Rows& output) {
  for (Int row = 0; row < rows.rows; ++row) {
    const Int head = rows.first_head + row % rows.group;
    float total = result.totals[row], factor = 1.f;
    if (rules.sinks) {
      const float sink = rules.sinks[head], peak = result.peaks[row] > sink ? result.peaks[row] : sink;
      factor = exp_of(result.peaks[row] - peak);
      total = total * factor + exp_of(sink - peak);
    }
    const float* const values = result.values + row * result.stride;
    const Int offset = (rows.first_token + row / rows.group) * output.token_stride + head * output.head_stride;
    if (output.number == Number::float32)
      finish_row(values, output.dim, factor / total, static_cast<float*>(output.data) + offset);
    else
      finish_row(values, output.dim, factor / total, static_cast<Half*>(output.data) + offset);
  }
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static constexpr AttentionKernels kernels{scratch_bytes,  take_queries, attend_in_place,
                                            attend_blocked, merge,        finish};
  return kernels;
}

}  // namespace ropewalk::ROPEWALK_LEVEL
