#include "cpu.h"

#include <cstdlib>
#include <cstring>

namespace jaxinfer {
namespace {

Level detect() {
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                  __builtin_cpu_supports("bmi2");
  if (!v3) return Level::kNone;
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
                  __builtin_cpu_supports("avx512bf16");
  const char* const most = std::getenv("JAXINFER_CPU_LEVEL");
  return v4 && (most == nullptr || std::strcmp(most, "3") != 0) ? Level::kV4 : Level::kV3;
}

}  // namespace

Level cpu_level() {
  static const Level level = detect();
  return level;
}

}  // namespace jaxinfer

// For Python: 0 (unusable), 3 or 4.
extern "C" int jaxinfer_cpu_level() {
  switch (jaxinfer::cpu_level()) {
    case jaxinfer::Level::kV3:
      return 3;
    case jaxinfer::Level::kV4:
      return 4;
    default:
      return 0;
  }
}
