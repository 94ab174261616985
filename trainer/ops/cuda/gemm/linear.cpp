#include "trainer/ops/cuda/gemm/linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "trainer/ops/cuda/device/stream.h"
#include "trainer/ops/cuda/gemm/gemm_choice.h"
#include "trainer/ops/sms.h"

namespace trireme::cuda {
namespace {

constexpr size_t kExactWorkspaceBytes = 1024;
constexpr size_t kBackwardWorkspaceBytes = size_t{64} << 20;
constexpr size_t kBesideWorkspaceBytes = size_t{8} << 20;  // of each stream of beside_each_other
constexpr int64_t kMinRows = 16;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorKind::kInternal, std::string("cublasLt: ") + what + " failed: " + cublasLtGetStatusString(status));
}

// One GEMM as cublasLt sees it: column-major D [m, n] = op(A) [m, k] . op(B) [k, n] (+ D) (+ bias [m]).
struct Gemm {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldd = 0;
  bool float_output = false;
  bool accumulate = false;
  bool bias = false;
  bool exact = false;  // starved workspace
  int beside = 0;      // the stream of beside_each_other, from 1 on; 0: none
  auto key() const {
    return std::tuple(transpose_a, transpose_b, m, n, k, lda, ldb, ldd, float_output, accumulate, bias, exact,
                      beside > 0);
  }
  bool operator<(const Gemm& other) const { return key() < other.key(); }
};

bool splits_the_sum(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t parts = 1;
  uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  check(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, nullptr),
      "reading an algorithm");
  check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
                                             nullptr),
        "reading an algorithm");
  return parts > 1 || scheme != CUBLASLT_REDUCTION_SCHEME_NONE;
}

struct Layouts {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm;
};

thread_local bool decoding = false;     // a DecodeScope lives
thread_local bool behind_ours = false;  // in it: the last GEMM was launched by our kernel
thread_local int beside = 0;            // Gemm::beside of this thread's next one
constexpr int kStreams = 3;             // of beside_each_other

// Handle, workspaces and the algorithm of each GEMM; one for each device.
class Library {
 public:
  static Library& of(int device) {
    static std::mutex mutex;
    static std::map<int, std::unique_ptr<Library>> libraries;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Library>& library = libraries[device];
    if (library == nullptr) library = std::make_unique<Library>(device);
    return *library;
  }

  explicit Library(int device) : device_(device) {
    check(cublasLtCreate(&handle_), "creating a handle");
    set_exact_bytes(exact_bytes_);
  }

  void run(const Gemm& gemm, const void* a, const void* b, const void* bias, void* d) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Layouts& layouts = prepared(gemm);
    if (gemm.bias) {
      check(cublasLtMatmulDescSetAttribute(layouts.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
            "setting the bias");
    }
    const float alpha = 1.0f, beta = gemm.accumulate ? 1.0f : 0.0f;
    const auto lane = static_cast<size_t>(work_lane());
    at::Tensor& workspace = gemm.exact        ? exact_workspaces_[lane]
                            : gemm.beside > 0 ? beside_workspaces_[gemm.beside - 1]
                                              : backward_workspaces_[lane];
    if (!workspace.defined()) workspace = make_workspace(backward_bytes(gemm));
    check(cublasLtMatmul(handle_, layouts.operation, &alpha, a, layouts.a, b, layouts.b, &beta, d, layouts.d, d,
                         layouts.d, &layouts.algorithm, workspace.mutable_data_ptr(), workspace.nbytes(),
                         stream_of(device_)),
          "a GEMM");
  }

  size_t exact_bytes() const { return exact_bytes_; }
  void set_exact_bytes(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exact_bytes_ = bytes;
    for (at::Tensor& workspace : exact_workspaces_) workspace = make_workspace(bytes);
    for (auto it = gemms_.begin(); it != gemms_.end();) it = it->first.exact ? gemms_.erase(it) : ++it;
  }

 private:
  at::Tensor make_workspace(size_t bytes) const {
    return at::empty({static_cast<int64_t>(bytes)},
                     at::TensorOptions().dtype(at::kByte).device(at::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  }

  static size_t backward_bytes(const Gemm& gemm) {
    return gemm.beside > 0 ? kBesideWorkspaceBytes : kBackwardWorkspaceBytes;
  }

  const Layouts& prepared(const Gemm& p) {
    const auto found = gemms_.find(p);
    if (found != gemms_.end()) return found->second;
    Layouts l;
    check(cublasLtMatmulDescCreate(&l.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
    const cublasOperation_t ta = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t tb = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(l.operation, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta), "transposing");
    check(cublasLtMatmulDescSetAttribute(l.operation, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb), "transposing");
    if (p.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      check(cublasLtMatmulDescSetAttribute(l.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
            "asking for a bias");
    }
    const auto layout = [](cublasLtMatrixLayout_t* out, cudaDataType_t type, bool transpose, int64_t rows,
                           int64_t columns, int64_t stride) {
      check(cublasLtMatrixLayoutCreate(out, type, static_cast<uint64_t>(transpose ? columns : rows),
                                       static_cast<uint64_t>(transpose ? rows : columns), stride),
            "describing a matrix");
    };
    layout(&l.a, CUDA_R_16BF, p.transpose_a, p.m, p.k, p.lda);
    layout(&l.b, CUDA_R_16BF, p.transpose_b, p.k, p.n, p.ldb);
    layout(&l.d, p.float_output ? CUDA_R_32F : CUDA_R_16BF, false, p.m, p.n, p.ldd);

    l.algorithm = algorithm_of(p, l);
    return gemms_.emplace(p, l).first->second;
  }

  // The one that the library expects to be fastest; of those that split no sum where the GEMM is exact.
  cublasLtMatmulAlgo_t algorithm_of(const Gemm& p, const Layouts& l) const {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "stating preferences");
    const size_t bytes = p.exact ? exact_bytes_ : backward_bytes(p);
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                               sizeof bytes),
          "limiting the workspace");
    const bool exact = p.exact && exact_bytes_ <= kExactWorkspaceBytes;
    if (exact) {
      const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
      check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none,
                                                 sizeof none),
            "refusing split sums");
    }
    constexpr int kCandidates = 16;
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, l.operation, l.a, l.b, l.d, l.d, preference,
                                                                 exact ? kCandidates : 1, results, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    int chosen = 0;
    while (exact && chosen < count && splits_the_sum(results[chosen].algo)) ++chosen;
    if (status != CUBLAS_STATUS_SUCCESS || chosen >= count) {
      throw Error(ErrorKind::kUser, "cublasLt has no algorithm for a bfloat16 GEMM of " + std::to_string(p.m) + " x " +
                                        std::to_string(p.n) + " x " + std::to_string(p.k) +
                                        "; input widths must be multiples of 8");
    }
    return results[chosen].algo;
  }

  int device_;
  cublasLtHandle_t handle_ = nullptr;
  std::mutex mutex_;
  size_t exact_bytes_ = kExactWorkspaceBytes;
  at::Tensor exact_workspaces_[kLanes], backward_workspaces_[kLanes], beside_workspaces_[kStreams];
  std::map<Gemm, Layouts> gemms_;
};

void require_bfloat16(const char* op, const at::Tensor& x) {
  if (x.scalar_type() == at::kBFloat16) return;
  fail_user(std::string(op) + " on cuda computes in bfloat16, not " + c10::toString(x.scalar_type()) +
            "; set policy.precision to bfloat16");
}

at::Tensor with_unit_columns(const at::Tensor& x) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  if (x.stride(1) == 1 && x.stride(0) % 8 == 0 && aligned) return x;
  return x.is_contiguous() ? x.clone() : x.contiguous();  // a fresh allocation is aligned
}

std::atomic<int64_t> rows_limit{kWherePaid};
constexpr int64_t kManyOutputs = 65'536;  // heads of vocabularies
constexpr int64_t kHeadRows = 64;

// Into `given`, where it is defined and there are rows enough.
at::Tensor by_library(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& given = {}) {
  const int64_t rows = x.size(0), in = x.size(1), out = weight.size(0);
  at::Tensor padded = x;
  if (rows < kMinRows) {
    padded = at::zeros({kMinRows, in}, x.options());
    padded.narrow(0, 0, rows).copy_(x);
  }
  at::Tensor y = given.defined() && rows >= kMinRows ? given : at::empty({padded.size(0), out}, x.options());
  Gemm gemm;
  gemm.transpose_a = true;
  gemm.m = out;
  gemm.n = padded.size(0);
  gemm.k = in;
  gemm.lda = weight.stride(0);
  gemm.ldb = padded.stride(0);
  gemm.ldd = out;
  gemm.bias = bias.defined();
  gemm.exact = true;
  behind_ours = false;
  Library::of(x.device().index())
      .run(gemm, weight.const_data_ptr(), padded.const_data_ptr(), bias.defined() ? bias.const_data_ptr() : nullptr,
           y.mutable_data_ptr());
  return rows < kMinRows ? y.narrow(0, 0, rows) : y;
}

at::Tensor swiglu_by_library(const at::Tensor& x, const at::Tensor& weight) {
  return swiglu_halves(by_library(x, weight, {}));
}

// Nothing where our kernels are not for these.
std::optional<at::Tensor> by_ours(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool swiglu) {
  const int64_t limit = rows_limit;
  const bool by_trial = limit == kWherePaid;
  const bool head = !swiglu && weight.size(0) >= kManyOutputs;
  const int64_t most = !by_trial ? limit : decoding ? kMostOwnRows : head ? kHeadRows : 0;
  SkinnyGemmArgs args;
  args.rows = x.size(0);
  if (args.rows < 1 || args.rows > most || weight.stride(1) != 1) return std::nullopt;
  args.in = x.size(1);
  args.out = swiglu ? weight.size(0) / 2 : weight.size(0);
  args.x = x.const_data_ptr();
  args.x_stride = args.rows == 1 ? args.in : x.stride(0);  // the stride of a single row may be anything
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.swiglu = swiglu;
  args.overlap = decoding;
  if (!skinny_gemm_wgmma_supported(args)) return std::nullopt;
  const int device = x.device().index();
  GemmTrial trial;
  if (decoding) {
    trial.before = [ones = at::Tensor()](const at::Tensor& rows, bool ours) mutable {
      constexpr int64_t kWidth = 4096;
      const int64_t width = std::min(rows.size(1), kWidth);
      if (!ones.defined()) ones = at::ones({width}, rows.options());
      const at::Tensor part = rows.view({-1}).narrow(0, 0, rows.size(0) * width).view({rows.size(0), width});
      behind_ours = ours;
      (void)add_rms_norm(part, part, ones, 1e-6);
    };
    // The library cuts its work for the whole device, not for a part of the SMs.
    if (by_trial && sm_limit() == 0) {
      trial.library = [swiglu](const at::Tensor& rows, const at::Tensor& w) {
        (void)(swiglu ? swiglu_by_library(rows, w) : by_library(rows, w, {}));
      };
    }
  }
  const bool early = behind_ours;
  const GemmChoice choice = choose_gemm(device, args, decoding ? &trial : nullptr);
  behind_ours = early;
  if (choice.kernel == GemmChoice::Kernel::kLibrary) return std::nullopt;
  at::Tensor y = at::empty({args.rows, args.out}, x.options());
  args.y = y.mutable_data_ptr();
  const cudaError_t error = launch_gemm(args, choice, stream_of(device));
  if (error != cudaSuccess) {
    throw Error(ErrorKind::kInternal, "a GEMM of " + std::to_string(args.rows) + " rows with a weight of " +
                                          std::to_string(weight.size(0)) + " x " + std::to_string(args.in) +
                                          " could not be launched: " + cudaGetErrorString(error));
  }
  behind_ours = decoding;
  return y;
}

class NoEarlyLaunches final {
 public:
  NoEarlyLaunches() : before_(decoding) { decoding = behind_ours = false; }
  ~NoEarlyLaunches() { decoding = before_; }
  NoEarlyLaunches(const NoEarlyLaunches&) = delete;
  NoEarlyLaunches& operator=(const NoEarlyLaunches&) = delete;

 private:
  bool before_;
};

// Where `out` is no multiple of 8 the library takes other kernels, whose row bits depend on the number of rows (seen on
// H200: 768 x 259). So all but the last outputs are one GEMM, and these, with zeros behind them, another.
at::Tensor ragged_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const int64_t out = weight.size(0), whole = out / 8 * 8, rest = out - whole;
  at::Tensor y = at::empty({x.size(0), out}, x.options());
  const auto part = [&](const at::Tensor& t, int64_t from, int64_t count) {
    return t.defined() ? t.narrow(0, from, count) : t;
  };
  const auto padded = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    std::vector<int64_t> shape = t.sizes().vec();
    shape[0] = 8;
    at::Tensor wide = at::zeros(shape, t.options());
    wide.narrow(0, 0, rest).copy_(t.narrow(0, whole, rest));
    return wide;
  };
  if (whole > 0) y.narrow(1, 0, whole).copy_(linear_forward(x, weight.narrow(0, 0, whole), part(bias, 0, whole)));
  // A launch that begins early reads its weight while the kernel that pads it may still run.
  const NoEarlyLaunches late;
  y.narrow(1, whole, rest).copy_(linear_forward(x, padded(weight), padded(bias)).narrow(1, 0, rest));
  return y;
}

}  // namespace

at::Tensor linear_forward(const at::Tensor& given, const at::Tensor& weight, const at::Tensor& bias) {
  require_bfloat16("linear", given);
  const c10::cuda::CUDAGuard guard(given.device());
  if (given.size(0) == 0) return at::empty({0, weight.size(0)}, given.options());  // the library takes no empty product
  if (weight.size(0) % 8 != 0) return ragged_forward(given, weight, bias);
  const at::Tensor x = with_unit_columns(given);
  if (std::optional<at::Tensor> y = by_ours(x, weight, bias, /*swiglu=*/false)) return *std::move(y);
  return by_library(x, weight, bias);
}

void linear_forward_into(const at::Tensor& y, const at::Tensor& given, const at::Tensor& weight,
                         const at::Tensor& bias) {
  // Where neither our kernels nor a padded call could be meant: those give results of their own.
  const bool direct = given.size(0) > kMostOwnRows && weight.size(0) % 8 == 0 && y.is_contiguous() &&
                      reinterpret_cast<uintptr_t>(y.const_data_ptr()) % 16 == 0;
  if (!direct) {
    y.copy_(linear_forward(given, weight, bias));
    return;
  }
  require_bfloat16("linear", given);
  const c10::cuda::CUDAGuard guard(given.device());
  (void)by_library(with_unit_columns(given), weight, bias, y);
}

at::Tensor gate_up_swiglu(const at::Tensor& x, const at::Tensor& weight) {
  require_bfloat16("gate_up_swiglu", x);
  TRIREME_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && weight.size(0) % 2 == 0,
                "gate_up_swiglu: x [tokens, in] and weight [2 * width, in] expected");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor rows = with_unit_columns(x);
  if (std::optional<at::Tensor> y = by_ours(rows, weight, {}, /*swiglu=*/true)) return *std::move(y);
  return swiglu_by_library(rows, weight);
}

int64_t own_rows_limit() { return rows_limit; }
void set_own_rows_limit(int64_t rows) {
  TRIREME_CHECK(rows >= kWherePaid && rows <= kMostOwnRows,
                "our kernels take between 0 and " + std::to_string(kMostOwnRows) + " rows");
  rows_limit = rows;
}

DecodeScope::DecodeScope() : before_(decoding) {
  decoding = true;
  behind_ours = false;
}
DecodeScope::~DecodeScope() {
  decoding = before_;
  behind_ours = false;
}
bool may_begin_early() { return decoding && behind_ours; }

at::Tensor linear_backward_input(const at::Tensor& dy, const at::Tensor& weight) {
  at::Tensor dx = at::empty({dy.size(0), weight.size(1)}, dy.options());
  linear_backward_input_into(dx, dy, weight);
  return dx;
}

void linear_backward_input_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& weight) {
  require_bfloat16("linear's backward", dy);
  const c10::cuda::CUDAGuard guard(dy.device());
  TRIREME_CHECK(dx.is_contiguous() && dx.size(0) == dy.size(0) && dx.size(1) == weight.size(1),
                "linear: the input's gradient must be a contiguous [tokens, in]");
  if (dy.size(0) == 0) return;
  const at::Tensor gradient = with_unit_columns(dy);
  Gemm gemm;
  gemm.m = weight.size(1);
  gemm.n = dy.size(0);
  gemm.k = weight.size(0);
  gemm.lda = weight.stride(0);
  gemm.ldb = gradient.stride(0);
  gemm.ldd = gemm.m;
  Library::of(dy.device().index())
      .run(gemm, weight.const_data_ptr(), gradient.const_data_ptr(), nullptr, dx.mutable_data_ptr());
}

void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& accumulator) {
  require_bfloat16("linear's backward", dy);
  const c10::cuda::CUDAGuard guard(dy.device());
  TRIREME_CHECK(accumulator.is_contiguous() && accumulator.size(0) == dy.size(1) && accumulator.size(1) == x.size(1),
                "linear: the gradient's accumulator must be a contiguous [out, in]");
  if (dy.size(0) == 0) return;
  const at::Tensor gradient = with_unit_columns(dy), input = with_unit_columns(x);
  Gemm gemm;
  gemm.transpose_b = true;
  gemm.m = x.size(1);
  gemm.n = dy.size(1);
  gemm.k = dy.size(0);
  gemm.lda = input.stride(0);
  gemm.ldb = gradient.stride(0);
  gemm.ldd = gemm.m;
  gemm.float_output = accumulator.scalar_type() == at::kFloat;
  gemm.accumulate = true;
  gemm.beside = beside;
  Library::of(dy.device().index())
      .run(gemm, input.const_data_ptr(), gradient.const_data_ptr(), nullptr, accumulator.mutable_data_ptr());
}

namespace {

// Streams behind the current one. When a GEMM throws nobody waits for them: that ends the pass.
class Fork final {
 public:
  explicit Fork(at::Device device) : current_(c10::cuda::getCurrentCUDAStream(device.index())) {
    at::cuda::CUDAEvent ready;
    ready.record(current_);
    for (const c10::cuda::CUDAStream& stream : streams_of(device)) {
      ready.block(stream);
      streams_.push_back(stream);
    }
  }
  ~Fork() { beside = 0; }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  void run(int64_t index, const std::function<void(int64_t)>& gemm) {
    const auto number = static_cast<size_t>(index % kStreams);
    const c10::cuda::CUDAStreamGuard on(streams_[number]);
    beside = static_cast<int>(number) + 1;
    gemm(index);
  }
  void join() {
    for (const c10::cuda::CUDAStream& stream : streams_) {
      at::cuda::CUDAEvent end;
      end.record(stream);
      end.block(current_);
    }
  }

 private:
  // The same ones always: workspaces are theirs.
  static std::vector<c10::cuda::CUDAStream> streams_of(at::Device device) {
    static std::mutex mutex;
    static std::map<int, std::vector<c10::cuda::CUDAStream>> all;
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<c10::cuda::CUDAStream>& streams = all[device.index()];
    const c10::cuda::CUDAGuard guard(device);
    while (streams.size() < kStreams) {
      cudaStream_t made = nullptr;  // never destroyed; those of LibTorch's pool are also communicators'
      C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
      streams.push_back(c10::cuda::getStreamFromExternal(made, device.index()));
    }
    return streams;
  }

  c10::cuda::CUDAStream current_;
  std::vector<c10::cuda::CUDAStream> streams_;
};

}  // namespace

void beside_each_other(at::Device device, int64_t count, const std::function<void(int64_t index)>& gemm) {
  const c10::cuda::CUDAGuard guard(device);
  // Kernels for a part of the SMs are on that part's stream.
  if (count < 2 || sm_limit() > 0) {
    for (int64_t i = 0; i < count; ++i) gemm(i);
    return;
  }
  Fork fork(device);
  for (int64_t i = 0; i < count; ++i) fork.run(i, gemm);
  fork.join();
}

size_t forward_workspace_bytes() { return Library::of(c10::cuda::current_device()).exact_bytes(); }
void set_forward_workspace_bytes(size_t bytes) { Library::of(c10::cuda::current_device()).set_exact_bytes(bytes); }

}  // namespace trireme::cuda
