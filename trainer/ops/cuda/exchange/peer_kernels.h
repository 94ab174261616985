// Exchanges between devices that see each other's memory (NVLink, one host), on raw pointers; no LibTorch here.
//
// A rank stores what is for another straight into that one's receive buffer, 16 bytes at a time. The buffer holds a
// word that is never sent, kNothing, until something has come: no flag and no fence stand between (push with a
// sentinel). The word is two negative zeros of bfloat16; such a pair is sent as positive ones. Three receive buffers
// take turns: what an exchange has used is emptied in the next one and filled again two later, when nobody can still be
// reading it. Whose turn it is stands on the device, so that a captured graph may be replayed.
//
// All ranks make the same exchanges, each with the same sizes, in one order; a rank's are on one stream at a time. A
// wait ends at `patience_ns`: then `absent` says who has not come, and what follows computes with what there is.
//
// Determinism class: row-exact. A sum is that of trainer/parallel/exchange.h: float32 from +0 in the order of ranks,
// rounded once. Nothing here allocates or waits on the host: legal in stream capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "trainer/ops/cuda/elementwise/row_kernels.h"

namespace trireme::cuda {

inline constexpr int kMostPeers = 8;
inline constexpr uint32_t kNothing = 0x80008000u;
inline constexpr int kPeerBuffers = 3;
// Of `state`, 32 bits each, zeros at first: the last exchange's buffer, blocks of this one that have ended, what each
// buffer holds (16-byte pieces from each rank), whether a wait was given up.
inline constexpr int kPeerStateWords = 6;

struct PeerMemoryView {
  int rank = 0, ranks = 1;
  void* receive[kMostPeers] = {};  // of each rank, as mapped here: [kPeerBuffers][ranks][slot_bytes]
  int64_t slot_bytes = 0;          // a multiple of 16
  uint32_t* state = nullptr;       // [kPeerStateWords], the rank's own
  uint32_t* absent = nullptr;      // a word of the host: 0, or 1 + the rank that did not come
  uint64_t patience_ns = 0;
};

// Rows of `width` elements from every rank to every rank, at most slot_bytes. Strides in elements; everything a
// multiple of 8.
struct PeerRows {
  const Bf16* in = nullptr;
  int64_t in_rank = 0, in_row = 0;  // to the rows for the next rank (0: the same for all), to the next row
  Bf16* out = nullptr;
  int64_t out_rank = 0, out_row = 0;  // to the rows from the next rank (not used by sums)
  int64_t rows = 0, width = 0;
};
void exchange_copies(const PeerMemoryView& peers, const PeerRows& rows, cudaStream_t stream, bool early);
void exchange_sums(const PeerMemoryView& peers, const PeerRows& rows, cudaStream_t stream, bool early);

// exchange_sums of `partial` to all and add_rms_norm_forward with the result, in one launch, with the bits of the two.
void exchange_add_rms_norm(const PeerMemoryView& peers, const Bf16* x, const Bf16* partial, const Bf16* weight,
                           float eps, const NormRows& rows, Bf16* sum, Bf16* normed, cudaStream_t stream, bool early);

// Ids (below 2^31) and log-probs of `rows` rows of each rank -> [ranks * rows] on all.
void exchange_samples(const PeerMemoryView& peers, const int64_t* ids, const float* logprobs, int64_t rows,
                      int64_t* all_ids, float* all_logprobs, cudaStream_t stream);

// Fills `words` 32-bit words of receive buffers with kNothing.
void empty_receive_buffers(void* buffers, int64_t words, cudaStream_t stream);

// parts [ranks][elements] -> their sum [elements], for carriers that bring whole parts. Elements: a multiple of 8.
void ordered_sum(const Bf16* parts, int ranks, int64_t elements, Bf16* sum, cudaStream_t stream);

}  // namespace trireme::cuda
