// Hopper's asynchronous machinery (sm_90a) as functions: barriers in shared memory, tensor copies, warpgroup products,
// clusters, dependent launches. The PTX ISA manual says what each instruction promises.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace trireme::cuda::hopper {

// ---- clusters and dependent launches

// Every thread of a warp together. A grid without clusters is one of clusters of one block.
// Relaxed: orders execution; of memory only what publish_barriers released.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Waits until the kernels that this launch depends on have ended and their writes are seen; nothing where the launch
// waited for them itself.
__device__ __forceinline__ void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Once every block has said so, a dependent launch may begin; it still waits for the end of this kernel where it calls
// wait_for_predecessors.
__device__ __forceinline__ void let_successors_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- barriers (addresses are those of the shared window)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the other blocks of the cluster and to the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for so many more bytes of copies.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// The barrier at the same address of another block of the cluster. Orders no ordinary memory accesses of the two
// blocks: it is for shared memory that only copies write and products read.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ bool phase_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
// Waits for the end of the phase of that parity (a fresh barrier counts as one whose phase of parity 1 has ended). No
// wait inside a kernel takes long: after the deadline it traps, which the host sees as a launch failure.
inline constexpr uint64_t kWaitDeadlineNs = 20'000'000'000;
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint64_t start = 0;
  for (uint32_t tries = 1; !phase_ended(barrier, parity); ++tries) {
    if (tries % 1024 != 0) continue;
    const uint64_t now = nanoseconds();
    if (start == 0) start = now;
    if (now - start > kWaitDeadlineNs) __trap();
  }
}

// ---- tensor copies

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box at (column, row) to shared memory; its bytes count for the barrier. What lies outside the tensor becomes 0.
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, int column, int row, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
// The same to the same places of every block of the cluster in `blocks` (a bit each).
__device__ __forceinline__ void load_box_to(uint32_t target, const CUtensorMap* map, int column, int row,
                                            uint32_t barrier, uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}
// Asks for the box to be brought into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}

// ---- warpgroup products

// Operand of a product in shared memory: rows of 64 bf16 (128 bytes) with the 128-byte swizzle of the tensor copies.
// `address`, a multiple of 1024, is where the first row begins; 32 bytes more for each step of 16 along a row.
__device__ __forceinline__ uint64_t swizzled_operand(uint32_t address) {
  constexpr uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return (static_cast<uint64_t>(address & 0x3ffff) >> 4) | uint64_t{1} << 16 | kEightRows << 32 | kSwizzle128 << 62;
}
// The operand so many bytes on. The address is the low half's, without a carry: it stays below 256 KiB.
__device__ __forceinline__ uint64_t operand_after(uint64_t operand, int bytes) {
  return (operand & 0xffffffff00000000u) | static_cast<uint32_t>(static_cast<uint32_t>(operand) + (bytes >> 4));
}
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of the accumulators over this place.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d [64, columns] = a [64, 16] . b [columns, 16]^T + (accumulate ? d : 0), bf16 in, float32 out. Warp w of the group
// holds rows 16 w ..; d[4 j + 2 h + e] of a lane is row lane / 4 + 8 h, column 8 j + 2 (lane % 4) + e.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int accumulate);

#define TRIREME_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TRIREME_R1 TRIREME_R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TRIREME_R2 TRIREME_R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TRIREME_R3 TRIREME_R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TRIREME_R4 TRIREME_R3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TRIREME_R5 TRIREME_R4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TRIREME_R6 TRIREME_R5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TRIREME_R7 TRIREME_R6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TRIREME_EIGHT(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define TRIREME_D0 TRIREME_EIGHT(0)
#define TRIREME_D1 TRIREME_D0, TRIREME_EIGHT(8)
#define TRIREME_D2 TRIREME_D1, TRIREME_EIGHT(16)
#define TRIREME_D3 TRIREME_D2, TRIREME_EIGHT(24)
#define TRIREME_D4 TRIREME_D3, TRIREME_EIGHT(32)
#define TRIREME_D5 TRIREME_D4, TRIREME_EIGHT(40)
#define TRIREME_D6 TRIREME_D5, TRIREME_EIGHT(48)
#define TRIREME_D7 TRIREME_D6, TRIREME_EIGHT(56)
// kEights: how many groups of 8 registers, less one; A, B, P: numbers of the operands after them.
#define TRIREME_MULTIPLY(kColumns, kEights, A, B, P)                                                         \
  template <>                                                                                                \
  __device__ __forceinline__ void multiply<kColumns>(float(&d)[kColumns / 2], uint64_t a, uint64_t b,        \
                                                     int accumulate) {                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kColumns \
                 "k16.f32.bf16.bf16 {" TRIREME_R##kEights "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"         \
                 : TRIREME_D##kEights                                                                        \
                 : "l"(a), "l"(b), "r"(accumulate));                                                         \
  }
TRIREME_MULTIPLY(16, 0, 8, 9, 10)
TRIREME_MULTIPLY(32, 1, 16, 17, 18)
TRIREME_MULTIPLY(48, 2, 24, 25, 26)
TRIREME_MULTIPLY(64, 3, 32, 33, 34)
TRIREME_MULTIPLY(80, 4, 40, 41, 42)
TRIREME_MULTIPLY(96, 5, 48, 49, 50)
TRIREME_MULTIPLY(112, 6, 56, 57, 58)
TRIREME_MULTIPLY(128, 7, 64, 65, 66)
#undef TRIREME_MULTIPLY
#undef TRIREME_D7
#undef TRIREME_D6
#undef TRIREME_D5
#undef TRIREME_D4
#undef TRIREME_D3
#undef TRIREME_D2
#undef TRIREME_D1
#undef TRIREME_D0
#undef TRIREME_EIGHT
#undef TRIREME_R7
#undef TRIREME_R6
#undef TRIREME_R5
#undef TRIREME_R4
#undef TRIREME_R3
#undef TRIREME_R2
#undef TRIREME_R1
#undef TRIREME_R0

}  // namespace trireme::cuda::hopper
