// Words in device memory that streams wait for and write without a kernel: how ranks tell each other what has been
// copied. On words of the own memory or of a peer's that is mapped here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trireme {

// Whether the driver has them; where not, the others may not be called.
bool streams_wait_for_words();
// What is launched on the stream from now on waits until the word has come to `count`. Counts wrap: a word that is up
// to 2^31 ahead is behind nobody.
void wait_for_word(cudaStream_t stream, void* word, uint32_t count);
// Behind everything that the stream has written, here and in others' memory.
void write_word(cudaStream_t stream, void* word, uint32_t count);

}  // namespace trireme
