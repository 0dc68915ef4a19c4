// The inner loops of attention, one set for each instruction set. Internal: other operators call attention.h.
#pragma once

#include "attention.h"
#include "dispatch.h"

namespace ropewalk {

// Keys are taken in blocks that begin at multiples of this. A block's result depends on the keys in it and on one row
// alone, and the results of a sequence's blocks are put together in their order, so that neither threads nor the batch
// matter.
constexpr std::int64_t kBlockKeys = 512;
// Query rows that share one copy of a block of keys and values; a row is one head of one token. More would leave too
// few tasks for the threads.
constexpr std::int64_t kBlockRows = 256;

// C [m, n] (+)= A [m, k] B [k, n] in bfloat16 into float32; rows of A and C and pairs of rows of B lie so many elements
// apart.
using Product = void (*)(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t stride_a, std::int64_t stride_b,
                         std::int64_t stride_c, const std::uint16_t* a, const std::uint16_t* b, float* c);

// Some tokens' rows of one key head: row r is head r % group of token r / group.
struct QueryRows {
  const Rows* query;
  std::int64_t first_token;     // in the packed batch
  std::int64_t first_position;  // in the sequence
  std::int64_t first_head;
  std::int64_t group;  // heads that share the key head
  std::int64_t rows;
};

// Some keys of one head, and where they are.
struct KeyBlock {
  const PagedRows* keys;
  const PagedRows* values;
  const std::int32_t* pages;  // of the sequence, from its first
  std::int64_t head;
  std::int64_t begin;  // positions in the sequence; begin is a multiple of kBlockKeys
  std::int64_t end;
};

// Softmax over some of the keys: sums of weights and of weighted values, both relative to exp(peak).
struct Partial {
  float* peaks;   // [rows], the largest logit; -inf where a row sees none of the keys
  float* totals;  // [rows]
  float* values;  // [rows and 16 more, stride], stride being dim in multiples of 16
  std::int64_t stride;
};

struct AttentionKernels {
  // Bytes of scratch memory that the functions want, 64-byte aligned.
  std::int64_t (*scratch_bytes)(std::int64_t key_dim, std::int64_t value_dim, std::int64_t rows, std::int64_t group);
  // Put the query's rows where one of the next two finds them in scratch memory; of the block, only its types matter.
  void (*take_queries)(const QueryRows& rows, const KeyBlock& block, bool blocked, void* scratch);
  // One block for a few rows: keys and values are read in place.
  void (*attend_in_place)(const QueryRows& rows, const KeyBlock& block, const LogitRules& rules, void* scratch,
                          const Partial& result);
  // One block for many rows: keys and values are copied, then multiplied as matrices. `product` may be null.
  void (*attend_blocked)(const QueryRows& rows, const KeyBlock& block, const LogitRules& rules, Product product,
                         void* scratch, const Partial& result);
  // Add the next block's result to what there is.
  void (*merge)(std::int64_t rows, std::int64_t dim, const Partial& next, const Partial& so_far);
  // Divide and round.
  void (*finish)(const QueryRows& rows, const LogitRules& rules, const Partial& result, const Rows& output);
};

ROPEWALK_DECLARE_KERNELS(AttentionKernels, attention_kernels)

}  // namespace ropewalk
