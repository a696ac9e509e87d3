// Which compiled variant of the SIMD sources this processor runs.
#pragma once

namespace jaxinfer {

enum class Level { kNone, kV3, kV4 };

// The best level of this processor. kNone: the library cannot be used.
Level cpu_level();

}  // namespace jaxinfer
