// Head norms, rotation and KV write as a call of XLA, which lets the pools that come in be the ones that go out.
#include "rope_kv_write.h"

#include "buffers.h"
#include "cpu.h"
#include "helpers.h"
#include "workers.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t TOKENS = 16;  // of one piece of work

ffi::Error rope_kv_write(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                         ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::F32> k_scale,
                         ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::F32> q_norm, ffi::Buffer<ffi::F32> k_norm,
                         ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k_out,
                         ffi::Result<ffi::AnyBuffer> v_out, float norm_eps) {
  auto activations = stored_type(qkv.element_type()), stored = stored_type(k.element_type());
  if (!activations || bytes_of(*activations) < 2 || !stored || k.element_type() != v.element_type())
    return ffi::Error::InvalidArgument("rope_kv_write: the dtypes of the activations or of the KV cache are not supported");
  if (k.untyped_data() != k_out->untyped_data() || v.untyped_data() != v_out->untyped_data())
    return ffi::Error::Internal("rope_kv_write: XLA gave the pools new memory instead of updating them in place");
  auto dims = qkv.dimensions(), k_dims = k.dimensions();
  RopeWrite a = {};
  a.N = k_dims[0], a.K = k_dims[1], a.S = k_dims[2];
  a.T = dims[0], a.H = dims[1] - 2 * a.K, a.h = dims[2], a.i = cos.dimensions()[1];
  a.activations = *activations, a.pool = *stored;
  a.qkv_TAh = qkv.untyped_data(), a.cos_Ti = cos.typed_data(), a.sin_Ti = sin.typed_data();
  a.k_scale_K = k_scale.typed_data(), a.v_scale_K = v_scale.typed_data();
  a.q_norm_h = present(q_norm), a.k_norm_h = present(k_norm);
  a.slot_T = slot.typed_data();
  a.q_THh = q->untyped_data(), a.k_NKSh = k_out->untyped_data(), a.v_NKSh = v_out->untyped_data();
  a.norm_eps = norm_eps;
  auto kernel = cpu_level() == Level::kV4 ? v4::rope_kv_write : v3::rope_kv_write;
  HelpedParallel(pool.num_threads()).each((a.T + TOKENS - 1) / TOKENS, [&](int64_t piece) {
    FlushSubnormal flush;
    int64_t begin = piece * TOKENS, end = begin + TOKENS < a.T ? begin + TOKENS : a.T;
    kernel(a, begin, end, scratch(2 * a.h));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_rope_kv_write, rope_kv_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("norm_eps"));

}  // namespace jaxinfer
