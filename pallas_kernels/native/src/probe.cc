// A function that does nothing but use what every kernel needs: says whether the library works in this process.
#include "helpers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

ffi::Error probe(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> x, ffi::ResultBuffer<ffi::S32> y) {
  HelpedParallel parallel(pool.num_threads());
  const int32_t* in = x.typed_data();
  int32_t* out = y->typed_data();
  parallel.each(static_cast<int64_t>(x.element_count()), [&](int64_t i) { out[i] = in[i] + 1; });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_probe, probe,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>());

}  // namespace jaxinfer
