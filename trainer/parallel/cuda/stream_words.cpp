#include "trainer/parallel/cuda/stream_words.h"

#include <string>

#include "base/error.h"
#include "trainer/ops/cuda/device/driver.h"

namespace trireme {
namespace {

struct WordCalls {
  decltype(cuStreamWaitValue32)* wait =
      cuda::driver_function<decltype(cuStreamWaitValue32)>("cuStreamWaitValue32", 12000);
  decltype(cuStreamWriteValue32)* write =
      cuda::driver_function<decltype(cuStreamWriteValue32)>("cuStreamWriteValue32", 12000);
};

const WordCalls& word_calls() {
  static const WordCalls functions;
  return functions;
}

void check_word(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS)
    fail_internal(std::string(what) + " gave the CUDA driver's error " + std::to_string(result));
}

}  // namespace

bool streams_wait_for_words() { return word_calls().wait != nullptr && word_calls().write != nullptr; }

void wait_for_word(cudaStream_t stream, void* word, uint32_t count) {
  check_word(word_calls().wait(stream, reinterpret_cast<CUdeviceptr>(word), count, CU_STREAM_WAIT_VALUE_GEQ),
             "waiting for a word");
}

void write_word(cudaStream_t stream, void* word, uint32_t count) {
  check_word(word_calls().write(stream, reinterpret_cast<CUdeviceptr>(word), count, CU_STREAM_WRITE_VALUE_DEFAULT),
             "writing a word");
}

}  // namespace trireme
