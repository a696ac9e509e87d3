// Buffers of XLA as arrays of stored values.
#pragma once

#include <optional>

#include "stored.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

// Unsigned integers hold the bits of values, as in kv_storage.py.
static inline std::optional<Stored> stored_type(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F32: return Stored::f32;
    case xla::ffi::DataType::F16: return Stored::f16;
    case xla::ffi::DataType::BF16:
    case xla::ffi::DataType::U16: return Stored::bf16;
    case xla::ffi::DataType::S8: return Stored::i8;
    case xla::ffi::DataType::F8E4M3FN:
    case xla::ffi::DataType::U8: return Stored::f8e4m3;
    case xla::ffi::DataType::F8E5M2: return Stored::f8e5m2;
    default: return std::nullopt;
  }
}

// An optional argument is an array without elements when it is absent.
template <xla::ffi::DataType type>
static inline const xla::ffi::NativeType<type>* present(const xla::ffi::Buffer<type>& buffer) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

}  // namespace jaxinfer
