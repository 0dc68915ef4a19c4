// What all operators share: instruction sets, number types and the paged memory. Plain data only, for the files that
// are compiled once for each instruction set include this too.
#pragma once

#include <cstdint>

namespace ropewalk {

// Instruction sets, each with all that the ones before it have. `amx` runs the loops of avx512_bf16 and leaves the
// large bf16 products to oneDNN.
enum class Level : int { portable, avx2, avx512, avx512_bf16, amx };

// The best that this CPU, the operating system and the limit allow.
Level current_level();

// Use nothing above a level from now on, in the whole process.
void limit_level(Level highest);

enum class Number : int { float32, bfloat16, int8 };

// One layer's keys or values, [pages, page_size, heads, dim], without gaps.
struct PagedRows {
  void* data;
  // float16 bits [pages, page_size, heads], a number is its integer times this; for int8 only.
  std::uint16_t* scales;
  Number number;
  std::int64_t page_size;
  std::int64_t heads;
  std::int64_t dim;
};

// Rows of heads, [tokens, heads, dim]; dimensions of a head lie one after another.
struct Rows {
  void* data;
  Number number;  // float32 or bfloat16
  // In elements.
  std::int64_t token_stride;
  std::int64_t head_stride;
  std::int64_t heads;
  std::int64_t dim;
};

}  // namespace ropewalk
