// Attention over the paged cache: what other operators may call.
#pragma once

#include "common.h"

namespace ropewalk {

// The sequences of a step, their query tokens packed without padding.
struct PackedSequences {
  std::int64_t count;
  const std::int32_t* cu_seq_q;     // [count + 1], cumulative query lengths
  const std::int32_t* key_lengths;  // [count], this step's tokens included
  const std::int32_t* block_table;  // [count, ...], the pages of each sequence in order
  std::int64_t table_stride;        // elements from one sequence's pages to the next one's
};

// How logits come from products. A logit is scale * (q . k), then soft_cap * tanh(that / soft_cap), then plus
// slope * (key's position - query's position).
struct LogitRules {
  float scale;          // > 0
  std::int64_t window;  // how many of the latest tokens are seen, the token itself included; 0 for all
  float soft_cap;       // 0 for none
  const float* sinks;   // [heads], a logit more in each softmax, whose share is lost; or null
  const float* slopes;  // [heads], ALiBi; or null
};

// Softmax of logits times values, causal, accumulated in float32.
//
// `query` and `output` are [T, heads, dim], of one number type; `output` has the values' dim. Keys and values of this
// step are in their pages already. Runs on torch's threads. A row's bits depend on its own sequence alone, not on what
// else is in the batch nor on the number of threads. With `deterministic` they do not depend either on how many of the
// sequence's tokens are computed in one step; without, steps of a few tokens go another way than large ones.
void paged_attention(const Rows& query, const PagedRows& keys, const PagedRows& values,
                     const PackedSequences& sequences, const LogitRules& rules, bool deterministic, const Rows& output);

}  // namespace ropewalk
