// Hopper's asynchronous machinery (sm_90a) as functions: barriers in shared memory, tensor copies, clusters, dependent
// launches. The PTX ISA manual says what each instruction promises.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace trireme::cuda::hopper {

// ---- clusters and dependent launches

// Every thread of a warp together. Only in a grid launched with clusters: in another the wait was seen never to end.
// Relaxed: orders execution; of memory only what publish_barriers released.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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
// The address of that barrier in the cluster's window, and an arrival there (in this block too).
__device__ __forceinline__ uint32_t barrier_of(uint32_t barrier, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(barrier), "r"(rank));
  return remote;
}
__device__ __forceinline__ void arrive_at(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
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
// Without the short sleep that the question above may take.
__device__ __forceinline__ bool has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
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
// Ends the kernel with an error that the host sees (an illegal address). Not by a trap: in a kernel that has one the
// compiler makes no use of the registers that take_registers gets (wgmma.cuh).
__device__ __forceinline__ void fail() {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(uint64_t{0}), "r"(0) : "memory");
}
// Waits for the end of the phase of that parity (a fresh barrier counts as one whose phase of parity 1 has ended). No
// wait inside a kernel takes long: after the deadline it fails.
inline constexpr uint64_t kWaitDeadlineNs = 20'000'000'000;
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint64_t start = 0;
  for (uint32_t tries = 1; !phase_ended(barrier, parity); ++tries) {
    if (tries % 1024 != 0) continue;
    const uint64_t now = nanoseconds();
    if (start == 0) start = now;
    if (now - start > kWaitDeadlineNs) fail();
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

}  // namespace trireme::cuda::hopper
