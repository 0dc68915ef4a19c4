// Which instruction sets this CPU has.
#include <ATen/native/CPUBlas.h>

#include <atomic>

#include "common.h"

namespace ropewalk {
namespace {

Level detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return Level::portable;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return Level::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Level::avx512;
  return Level::amx;
#else
  return Level::portable;
#endif
}

std::atomic<Level> limit{Level::amx};

}  // namespace

Level current_level() {
  static const Level best = detect();
  const Level level = std::min(best, limit.load(std::memory_order_relaxed));
  // torch packs operands for AMX alone, and not at all where oneDNN is switched off.
  if (level == Level::amx && !at::native::cpublas::could_pack(at::kBFloat16)) return Level::avx512_bf16;
  return level;
}

void limit_level(Level highest) { limit.store(highest, std::memory_order_relaxed); }

}  // namespace ropewalk
