// Attention over the paged cache: how a step is cut into tasks, and which thread does what.
#include "attention.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "attention_kernels.h"

namespace ropewalk {
namespace {

using Int = std::int64_t;

// Up to so many query rows of a key head read keys and values in place: copying them would cost more than it saves.
constexpr Int kFewRows = 8;
// Multiplications that are worth waking another thread for.
constexpr Int kWorthAThread = 1 << 19;
// Tasks for each thread where long sequences are cut, so that threads finish together.
constexpr Int kTasksPerThread = 4;

// Some query tokens of one sequence under one key head.
struct Unit {
  QueryRows rows;
  KeyBlock keys;  // all that the rows see, from a multiple of kBlockKeys
  bool blocked;
  Int dims;  // of a key and a value together
  // Of the first block's partial result in memory that is shared by tasks; where the unit is one task alone, none is
  // there.
  Int first_partial;

  Int blocks() const { return (keys.end - keys.begin + kBlockKeys - 1) / kBlockKeys; }
  Int cost() const { return rows.rows * (keys.end - keys.begin) * dims; }
};

// Some blocks of one or more units that lie one after another and are alike but for the key head.
struct Task {
  Int first_unit;
  Int units;
  Int first_block;
  Int last_block;
  Int cost;
};

class Buffer {
 public:
  char* at_least(Int bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), kAlignment)));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(char* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<char, Delete> memory_;
  Int size_ = 0;
};

Int round_up(Int number, Int multiple) { return (number + multiple - 1) / multiple * multiple; }

// One partial result's place: values, then peaks, then totals.
struct PartialShape {
  Int rows;
  Int stride;

  Int floats() const { return rows * stride + 2 * rows; }
  Partial at(float* memory) const { return {memory + rows * stride, memory + rows * stride + rows, memory, stride}; }
};

PartialShape shape_of(const Unit& unit) { return {unit.rows.rows + 16, round_up(unit.keys.values->dim, 16)}; }

void multiply_by_onednn(Int m, Int n, Int k, Int stride_a, Int stride_b, Int stride_c, const std::uint16_t* a,
                        const std::uint16_t* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, stride_a, stride_b, stride_c, false, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c);
}

// The units of a step: of each sequence, blocks of query tokens, under each key head.
std::vector<Unit> units_of(const Rows& query, const PagedRows& keys, const PagedRows& values,
                           const PackedSequences& sequences, Int window, bool deterministic) {
  const Int group = query.heads / keys.heads, most_tokens = std::max<Int>(1, kBlockRows / group);
  std::vector<Unit> units;
  for (Int sequence = 0; sequence < sequences.count; ++sequence) {
    const Int first = sequences.cu_seq_q[sequence], tokens = sequences.cu_seq_q[sequence + 1] - first;
    const Int past = sequences.key_lengths[sequence] - tokens;
    for (Int done = 0; done < tokens; done += most_tokens) {
      const Int some = std::min(most_tokens, tokens - done), position = past + done;
      const Int begin = window ? std::max<Int>(0, position - window + 1) / kBlockKeys * kBlockKeys : 0;
      for (Int head = 0; head < keys.heads; ++head) {
        units.push_back({
            {&query, first + done, position, head * group, group, some * group},
            {&keys, &values, sequences.block_table + sequence * sequences.table_stride, head, begin, position + some},
            deterministic || some * group > kFewRows,
            keys.dim + values.dim,
            -1,
        });
      }
    }
  }
  return units;
}

// Into how many tasks a unit's blocks are put.
Int parts_of(const Unit& unit, Int fair, Int threads) {
  if (!unit.blocked) return unit.blocks();
  return threads == 1 ? 1 : std::clamp<Int>(unit.cost() / fair, 1, unit.blocks());
}

// Tasks, the dearest first. A unit that is much of the whole is cut between its blocks. Of a few rows in a long
// sequence, a task takes one block for all key heads: these lie side by side in memory, and what is fetched beside one
// serves the next.
std::vector<Task> tasks_of(std::vector<Unit>& units, Int heads, Int threads, Int* partial_floats) {
  Int whole = 0;
  for (const Unit& unit : units) whole += unit.cost();
  const Int fair = std::max<Int>(1, whole / (threads * kTasksPerThread));
  std::vector<Task> tasks;
  *partial_floats = 0;
  for (Int i = 0; i < static_cast<Int>(units.size()); i += heads) {
    const Unit& first = units[i];
    const Int blocks = first.blocks(), parts = parts_of(first, fair, threads);
    if (parts > 1) {
      for (Int head = 0; head < heads; ++head) {
        units[i + head].first_partial = *partial_floats;
        *partial_floats += blocks * shape_of(first).floats();
      }
    }
    const Int together = !first.blocked && first.cost() * heads / parts < fair ? heads : 1;
    for (Int part = 0; part < parts; ++part) {
      const Int begin = blocks * part / parts, end = blocks * (part + 1) / parts;
      const Int cost = first.cost() * together * (end - begin) / blocks;
      for (Int head = 0; head < heads; head += together) tasks.push_back({i + head, together, begin, end, cost});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return tasks;
}

class Step {
 public:
  Step(const LogitRules& rules, const Rows& output, Level level, std::vector<Unit>& units, float* partials)
      : rules_(rules),
        output_(output),
        kernels_(ROPEWALK_KERNELS_AT(level, attention_kernels)),
        product_(level == Level::amx ? multiply_by_onednn : nullptr),
        units_(units),
        partials_(partials) {}

  void run(const Task& task) const {
    for (Int i = 0; i < task.units; ++i) run(units_[task.first_unit + i], task);
  }

  // What is left of a unit that was cut.
  void put_together(const Unit& unit) const {
    if (unit.first_partial < 0) return;
    const Partial so_far = partial_of(unit, 0);
    for (Int block = 1; block < unit.blocks(); ++block)
      kernels_.merge(unit.rows.rows, so_far.stride, partial_of(unit, block), so_far);
    kernels_.finish(unit.rows, rules_, so_far, output_);
  }

  void release() const {
    if (product_) at::native::cpublas::brgemm_release();
  }

 private:
  void run(const Unit& unit, const Task& task) const {
    const PartialShape shape = shape_of(unit);
    const QueryRows& rows = unit.rows;
    const Int scratch =
        round_up(kernels_.scratch_bytes(unit.keys.keys->dim, unit.keys.values->dim, rows.rows, rows.group), 64);
    const Int partial = round_up(shape.floats() * static_cast<Int>(sizeof(float)), 64);
    thread_local Buffer buffer;
    char* const memory = buffer.at_least(scratch + 2 * partial);
    const Partial so_far = shape.at(reinterpret_cast<float*>(memory + scratch));
    const Partial next = shape.at(reinterpret_cast<float*>(memory + scratch + partial));
    kernels_.take_queries(unit.rows, unit.keys, unit.blocked, memory);
    for (Int block = task.first_block; block < task.last_block; ++block) {
      if (unit.first_partial >= 0) {
        attend(unit, block, memory, partial_of(unit, block));
      } else {
        attend(unit, block, memory, block == 0 ? so_far : next);
        if (block > 0) kernels_.merge(unit.rows.rows, shape.stride, next, so_far);
      }
    }
    if (unit.first_partial < 0) kernels_.finish(unit.rows, rules_, so_far, output_);
  }

  Partial partial_of(const Unit& unit, Int block) const {
    const PartialShape shape = shape_of(unit);
    return shape.at(partials_ + unit.first_partial + block * shape.floats());
  }

  void attend(const Unit& unit, Int block, void* scratch, const Partial& result) const {
    KeyBlock keys = unit.keys;
    keys.begin += block * kBlockKeys;
    keys.end = std::min(keys.end, keys.begin + kBlockKeys);
    if (unit.blocked)
      kernels_.attend_blocked(unit.rows, keys, rules_, product_, scratch, result);
    else
      kernels_.attend_in_place(unit.rows, keys, rules_, scratch, result);
  }

  const LogitRules& rules_;
  const Rows& output_;
  const AttentionKernels& kernels_;
  const Product product_;
  const std::vector<Unit>& units_;
  float* const partials_;
};

}  // namespace

void paged_attention(const Rows& query, const PagedRows& keys, const PagedRows& values,
                     const PackedSequences& sequences, const LogitRules& rules, bool deterministic,
                     const Rows& output) {
  std::vector<Unit> units = units_of(query, keys, values, sequences, rules.window, deterministic);
  Int work = 0;
  for (const Unit& unit : units) work += unit.cost();
  const Int threads = at::in_parallel_region() ? 1 : std::clamp<Int>(work / kWorthAThread, 1, at::get_num_threads());
  Int partial_floats = 0;
  const std::vector<Task> tasks = tasks_of(units, keys.heads, threads, &partial_floats);
  thread_local Buffer partials;
  float* const memory = reinterpret_cast<float*>(partials.at_least(partial_floats * static_cast<Int>(sizeof(float))));
  const Step step(rules, output, current_level(), units, memory);
  std::atomic<std::size_t> next{0};
  at::parallel_for(0, threads, 1, [&](Int, Int) {
    for (std::size_t i = next++; i < tasks.size(); i = next++) step.run(tasks[i]);
    step.release();
  });
  for (const Unit& unit : units) step.put_together(unit);
}

}  // namespace ropewalk
