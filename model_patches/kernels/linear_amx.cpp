// Products with one panel in AMX tiles. Empty where the machine is not x86-64.
//
// A tile of 16 rows by 32 depths of x, times two tiles of the panel, 16 pairs of depths by 16 columns each. The order of
// additions is the order of depth, so a row's sums do not depend on how many rows go with it.
#include "linear_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROPEWALK_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace ropewalk::amx {
namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kTileBytes = 64;
// Intel's manual, LDTILECFG: palette, first row, 14 reserved bytes, bytes in a row of each tile, rows of each tile.
struct alignas(64) TileConfig {
  std::uint8_t palette;
  std::uint8_t start_row;
  std::uint8_t reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

// Sums are tiles 0 to 3, x is 4 and 5, the panel 6 and 7.
ROPEWALK_AMX void multiply_sixteen(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* panel, std::int64_t depth,
                                   float* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (std::int64_t k = 0; k < depth; k += kDepthStep, panel += kDepthStep * kPanelColumns) {
    for (int line = 0; line < 32; ++line) __builtin_prefetch(reinterpret_cast<const char*>(panel) + kPrefetchBytes + 64 * line);
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(6, panel, 2 * kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kPanelColumns, 2 * kTileBytes);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, out, kPanelColumns * 4);
  _tile_stored(1, out + kTileRows, kPanelColumns * 4);
}

ROPEWALK_AMX void multiply_thirty_two(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* panel,
                                      std::int64_t depth, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t k = 0; k < depth; k += kDepthStep, panel += kDepthStep * kPanelColumns) {
    for (int line = 0; line < 32; ++line) __builtin_prefetch(reinterpret_cast<const char*>(panel) + kPrefetchBytes + 64 * line);
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(6, panel, 2 * kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kPanelColumns, 2 * kTileBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + kTileRows * stride + k, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kPanelColumns * 4);
  _tile_stored(1, out + kTileRows, kPanelColumns * 4);
  _tile_stored(2, out + kTileRows * kPanelColumns, kPanelColumns * 4);
  _tile_stored(3, out + kTileRows * kPanelColumns + kTileRows, kPanelColumns * 4);
}

}  // namespace

bool available() {
  // Linux, Documentation/arch/x86/xstate.rst: a process asks for ARCH_REQ_XCOMP_PERM of the tiles' state, number 18.
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
}

ROPEWALK_AMX void open(std::int64_t rows) {
  TileConfig config{};
  config.palette = 1;
  const std::int64_t first = rows < kTileRows ? rows : kTileRows;
  const std::int64_t second = rows <= kTileRows ? kTileRows : rows < kMultiplyRows ? rows - kTileRows : kTileRows;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileBytes;
    const bool of_first = tile == 0 || tile == 1 || tile == 4, of_second = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = static_cast<std::uint8_t>(of_first ? first : of_second ? second : kTileRows);
  }
  asm volatile("" : : "r"(&config) : "memory");  // the intrinsic does not say that it reads all of it
  _tile_loadconfig(&config);
}

ROPEWALK_AMX void close() { _tile_release(); }

void multiply(const void* x, std::int64_t stride, std::int64_t rows, const void* panel, std::int64_t depth, float* out) {
  const auto* row = static_cast<const std::uint16_t*>(x);
  const auto* weights = static_cast<const std::uint16_t*>(panel);
  if (rows <= kTileRows) return multiply_sixteen(row, stride, weights, depth, out);
  multiply_thirty_two(row, stride, weights, depth, out);
}

}  // namespace ropewalk::amx
#endif
