// Products of a group of four warps (wgmma, sm_90a): sum [64, columns] += a [64, 16] . b [columns, 16]^T, bf16 into
// float32; b in shared memory in rows of 128 bytes with the 128-byte swizzle, a there too or in registers. The PTX ISA
// manual
// ("Asynchronous warpgroup level matrix multiply") says what the descriptor's bits are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace trireme::cuda::hopper {

// The lower half of a descriptor of rows of 128 bytes from `address` (a multiple of 1024), eight to an atom of the
// swizzle, atoms 1024 bytes apart. The upper half is the same for all.
__device__ __forceinline__ uint32_t swizzled_rows(uint32_t address) {
  constexpr uint32_t kUnused = 1u << 16;
  return kUnused | ((address & 0x3ffffu) >> 4);
}
// Of rows whose columns are the outer index (multiply_rows with kAcross): blocks of 64 columns 8 KiB apart.
__device__ __forceinline__ uint32_t swizzled_columns(uint32_t address) {
  constexpr uint32_t kBetween = (8192u / 16) << 16;
  return kBetween | ((address & 0x3ffffu) >> 4);
}
// The same rows, so many bytes further.
__device__ __forceinline__ uint32_t further(uint32_t rows, uint32_t bytes) { return rows + bytes / 16; }

// Before the first product after sums were written by other instructions.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_of_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most so many of the last groups are under way.
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// Keeps the compiler from moving uses of the sums past this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// The same of operands in registers.
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&fragments)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int part = 0; part < 4; ++part) asm volatile("" : "+r"(fragments[i][part])::"memory");
  }
}

// A group of four warps that needs at most so many registers a thread from here on, and one that takes so many (it
// waits until there are as many).
template <int kRegisters>
__device__ __forceinline__ void give_registers_away() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Thread t of the group holds rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 b + 2 (t % 4) (+ 1): sum[4 b + 2 h + c]
// for h of the rows, c of the columns.
template <int kColumns>
__device__ void multiply_group(float (&sum)[kColumns / 2], uint32_t a, uint32_t b);

#define TRIREME_NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TRIREME_NAMES_2 \
  TRIREME_NAMES_1       \
  ", "                  \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define TRIREME_NAMES_3 \
  TRIREME_NAMES_2       \
  ", "                  \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define TRIREME_NAMES_4 \
  TRIREME_NAMES_3       \
  ", "                  \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define TRIREME_NAMES_5 \
  TRIREME_NAMES_4       \
  ", "                  \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define TRIREME_NAMES_6 \
  TRIREME_NAMES_5       \
  ", "                  \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define TRIREME_NAMES_7 \
  TRIREME_NAMES_6       \
  ", "                  \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define TRIREME_NAMES_8 \
  TRIREME_NAMES_7       \
  ", "                  \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define TRIREME_NAMES_9 \
  TRIREME_NAMES_8       \
  ", "                  \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define TRIREME_NAMES_10 \
  TRIREME_NAMES_9        \
  ", "                   \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define TRIREME_NAMES_11 \
  TRIREME_NAMES_10       \
  ", "                   \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define TRIREME_NAMES_12 \
  TRIREME_NAMES_11       \
  ", "                   \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define TRIREME_NAMES_13 \
  TRIREME_NAMES_12       \
  ", "                   \
  "%96, %97, %98, %99, %100, %101, %102, %103"
#define TRIREME_NAMES_14 \
  TRIREME_NAMES_13       \
  ", "                   \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define TRIREME_NAMES_15 \
  TRIREME_NAMES_14       \
  ", "                   \
  "%112, %113, %114, %115, %116, %117, %118, %119"
#define TRIREME_NAMES_16 \
  TRIREME_NAMES_15       \
  ", "                   \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define TRIREME_EIGHT(i)                                                                                  \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
      "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define TRIREME_SUMS_1 TRIREME_EIGHT(0)
#define TRIREME_SUMS_2 TRIREME_SUMS_1, TRIREME_EIGHT(8)
#define TRIREME_SUMS_3 TRIREME_SUMS_2, TRIREME_EIGHT(16)
#define TRIREME_SUMS_4 TRIREME_SUMS_3, TRIREME_EIGHT(24)
#define TRIREME_SUMS_5 TRIREME_SUMS_4, TRIREME_EIGHT(32)
#define TRIREME_SUMS_6 TRIREME_SUMS_5, TRIREME_EIGHT(40)
#define TRIREME_SUMS_7 TRIREME_SUMS_6, TRIREME_EIGHT(48)
#define TRIREME_SUMS_8 TRIREME_SUMS_7, TRIREME_EIGHT(56)
#define TRIREME_SUMS_9 TRIREME_SUMS_8, TRIREME_EIGHT(64)
#define TRIREME_SUMS_10 TRIREME_SUMS_9, TRIREME_EIGHT(72)
#define TRIREME_SUMS_11 TRIREME_SUMS_10, TRIREME_EIGHT(80)
#define TRIREME_SUMS_12 TRIREME_SUMS_11, TRIREME_EIGHT(88)
#define TRIREME_SUMS_13 TRIREME_SUMS_12, TRIREME_EIGHT(96)
#define TRIREME_SUMS_14 TRIREME_SUMS_13, TRIREME_EIGHT(104)
#define TRIREME_SUMS_15 TRIREME_SUMS_14, TRIREME_EIGHT(112)
#define TRIREME_SUMS_16 TRIREME_SUMS_15, TRIREME_EIGHT(120)
// 0x40000040: the swizzle of 128 bytes, atoms 64 times 16 bytes apart.
#define TRIREME_MULTIPLY_GROUP(COLUMNS, EIGHTS, A, B)                                                         \
  template <>                                                                                                 \
  __device__ __forceinline__ void multiply_group<COLUMNS>(float(&sum)[COLUMNS / 2], uint32_t a, uint32_t b) { \
    asm volatile(                                                                                             \
        "{\n.reg .pred add;\n.reg .b64 da, db;\nsetp.eq.u32 add, 0, 0;\n"                                     \
        "mov.b64 da, {%" #A ", 0x40000040};\nmov.b64 db, {%" #B                                               \
        ", 0x40000040};\n"                                                                                    \
        "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" TRIREME_NAMES_##EIGHTS             \
        "}, da, db, add, 1, 1, 0, 0;\n}\n"                                                                    \
        : TRIREME_SUMS_##EIGHTS                                                                               \
        : "r"(a), "r"(b)                                                                                      \
        : "memory");                                                                                          \
  }
TRIREME_MULTIPLY_GROUP(16, 1, 8, 9)
TRIREME_MULTIPLY_GROUP(32, 2, 16, 17)
TRIREME_MULTIPLY_GROUP(48, 3, 24, 25)
TRIREME_MULTIPLY_GROUP(64, 4, 32, 33)
TRIREME_MULTIPLY_GROUP(80, 5, 40, 41)
TRIREME_MULTIPLY_GROUP(96, 6, 48, 49)
TRIREME_MULTIPLY_GROUP(112, 7, 56, 57)
TRIREME_MULTIPLY_GROUP(128, 8, 64, 65)
TRIREME_MULTIPLY_GROUP(144, 9, 72, 73)
TRIREME_MULTIPLY_GROUP(160, 10, 80, 81)
TRIREME_MULTIPLY_GROUP(176, 11, 88, 89)
TRIREME_MULTIPLY_GROUP(192, 12, 96, 97)
TRIREME_MULTIPLY_GROUP(208, 13, 104, 105)
TRIREME_MULTIPLY_GROUP(240, 15, 120, 121)
TRIREME_MULTIPLY_GROUP(256, 16, 128, 129)
// The same with rows from registers: a of a warp as mma.sync m16n8k16 wants it, of the warp's 16 rows. kAcross: b's
// rows of 128 bytes run along the summed index and hold 64 columns each (b [16, columns], as values of attention),
// further blocks of 64 columns 8 KiB apart. First: sum is a . b alone.
#define TRIREME_NAMES_4H TRIREME_NAMES_4 ", %32, %33, %34, %35"
#define TRIREME_NAMES_8H TRIREME_NAMES_8 ", %64, %65, %66, %67"
#define TRIREME_FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define TRIREME_SUMS_4H TRIREME_SUMS_4, TRIREME_FOUR(32)
#define TRIREME_SUMS_8H TRIREME_SUMS_8, TRIREME_FOUR(64)
template <int kColumns, bool kAcross, bool kFirst>
__device__ void multiply_rows(float (&sum)[kColumns / 2], const uint32_t (&a)[4], uint32_t b);

#define TRIREME_MULTIPLY_ROWS(COLUMNS, EIGHTS, ACROSS, A0, A1, A2, A3, B, TRANSPOSED)                        \
  template <>                                                                                                \
  __device__ __forceinline__ void multiply_rows<COLUMNS, ACROSS, false>(float(&sum)[COLUMNS / 2],            \
                                                                        const uint32_t(&a)[4], uint32_t b) { \
    asm volatile("{\n.reg .pred add;\n.reg .b64 db;\nsetp.eq.u32 add, 0, 0;\nmov.b64 db, {%" #B              \
                 ", 0x40000040};\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" TRIREME_NAMES_##EIGHTS   \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, db, add, 1, 1, " #TRANSPOSED ";\n}\n"         \
                 : TRIREME_SUMS_##EIGHTS                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b)                                        \
                 : "memory");                                                                                \
  }
TRIREME_MULTIPLY_ROWS(64, 4, false, 32, 33, 34, 35, 36, 0)
TRIREME_MULTIPLY_ROWS(64, 4, true, 32, 33, 34, 35, 36, 1)
TRIREME_MULTIPLY_ROWS(128, 8, true, 64, 65, 66, 67, 68, 1)
TRIREME_MULTIPLY_ROWS(72, 4H, true, 36, 37, 38, 39, 40, 1)
TRIREME_MULTIPLY_ROWS(136, 8H, true, 68, 69, 70, 71, 72, 1)
// What was in the sums is no operand of these: multiply_rows and multiply_group as the first of a chain.
#define TRIREME_NEW_EIGHT(i)                                                                              \
  "=f"(sum[i]), "=f"(sum[i + 1]), "=f"(sum[i + 2]), "=f"(sum[i + 3]), "=f"(sum[i + 4]), "=f"(sum[i + 5]), \
      "=f"(sum[i + 6]), "=f"(sum[i + 7])
#define TRIREME_NEW_SUMS TRIREME_NEW_EIGHT(0), TRIREME_NEW_EIGHT(8), TRIREME_NEW_EIGHT(16), TRIREME_NEW_EIGHT(24)
template <>
__device__ __forceinline__ void multiply_rows<64, false, true>(float (&sum)[32], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 db;\nsetp.ne.u32 add, 0, 0;\nmov.b64 db, {%36, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TRIREME_NAMES_4
      "}, {%32, %33, %34, %35}, db, add, 1, 1, 0;\n}\n"
      : TRIREME_NEW_SUMS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b)
      : "memory");
}
__device__ __forceinline__ void multiply_first_group(float (&sum)[32], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 da, db;\nsetp.ne.u32 add, 0, 0;\n"
      "mov.b64 da, {%32, 0x40000040};\nmov.b64 db, {%33, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TRIREME_NAMES_4 "}, da, db, add, 1, 1, 0, 0;\n}\n"
      : TRIREME_NEW_SUMS
      : "r"(a), "r"(b)
      : "memory");
}
#undef TRIREME_NEW_SUMS
#undef TRIREME_NEW_EIGHT
#undef TRIREME_MULTIPLY_ROWS
#undef TRIREME_NAMES_4H
#undef TRIREME_NAMES_8H
#undef TRIREME_FOUR
#undef TRIREME_SUMS_4H
#undef TRIREME_SUMS_8H
#undef TRIREME_MULTIPLY_GROUP
#undef TRIREME_EIGHT
#undef TRIREME_NAMES_1
#undef TRIREME_SUMS_1
#undef TRIREME_NAMES_2
#undef TRIREME_SUMS_2
#undef TRIREME_NAMES_3
#undef TRIREME_SUMS_3
#undef TRIREME_NAMES_4
#undef TRIREME_SUMS_4
#undef TRIREME_NAMES_5
#undef TRIREME_SUMS_5
#undef TRIREME_NAMES_6
#undef TRIREME_SUMS_6
#undef TRIREME_NAMES_7
#undef TRIREME_SUMS_7
#undef TRIREME_NAMES_8
#undef TRIREME_SUMS_8
#undef TRIREME_NAMES_9
#undef TRIREME_SUMS_9
#undef TRIREME_NAMES_10
#undef TRIREME_SUMS_10
#undef TRIREME_NAMES_11
#undef TRIREME_SUMS_11
#undef TRIREME_NAMES_12
#undef TRIREME_SUMS_12
#undef TRIREME_NAMES_13
#undef TRIREME_SUMS_13
#undef TRIREME_NAMES_14
#undef TRIREME_SUMS_14
#undef TRIREME_NAMES_15
#undef TRIREME_SUMS_15
#undef TRIREME_NAMES_16
#undef TRIREME_SUMS_16

}  // namespace trireme::cuda::hopper
