// Kernels that are compiled once for each instruction set: how they are declared, and which of them run.
#pragma once

#include "common.h"

#if defined(__x86_64__)

// `const Kernels& name()`, in the namespace of each instruction set.
#define ROPEWALK_DECLARE_KERNELS(Kernels, name) \
  namespace portable {                          \
  const Kernels& name();                        \
  }                                             \
  namespace avx2 {                              \
  const Kernels& name();                        \
  }                                             \
  namespace avx512 {                            \
  const Kernels& name();                        \
  }                                             \
  namespace avx512_bf16 {                       \
  const Kernels& name();                        \
  }

// Those of a level. AMX has none of its own.
#define ROPEWALK_KERNELS_AT(level, name)                       \
  ((level) >= Level::avx512_bf16 ? avx512_bf16::name()         \
   : (level) == Level::avx512    ? avx512::name()              \
   : (level) == Level::avx2      ? avx2::name()                \
                                 : portable::name())

#else

#define ROPEWALK_DECLARE_KERNELS(Kernels, name) \
  namespace portable {                          \
  const Kernels& name();                        \
  }

#define ROPEWALK_KERNELS_AT(level, name) (static_cast<void>(level), portable::name())

#endif
