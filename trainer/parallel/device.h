// The device of a rank. Builds with CUDA link cuda/device.cpp, the others no_cuda/device.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "topology/topology.h"

namespace trireme {

// What the driver must be told before a device is used first: its environment variables and their values, for a process
// whose models are split by these layouts. Nothing where no tensor ranks or stages send each other anything.
std::vector<std::pair<std::string, std::string>> driver_settings(const std::vector<Layout>& layouts);
// Sets them; those that are set stay. Nothing on CPU.
void prepare_devices(const std::vector<Layout>& layouts);

// `setting`: "cpu", "cuda" or "auto" (CUDA where this build and this machine have it). On CUDA local rank i takes GPU i
// and makes it the process's current device. Throws Error(kUser) that says what is missing; a GPU without kernels here
// is refused by its name, under "auto" too.
at::Device choose_device(const std::string& setting, int local_rank);

// The kernels are for compute capability 9.0 (H100, H200, GH200: any number of SMs, any memory). Throws
// Error(kUser) that names the GPU and says what else may be done.
void require_hopper(const std::string& name, int major, int minor);

// Waits until the device has done everything that was queued; nothing on CPU.
void synchronize(at::Device device);

// Bytes of the device's memory; of a CPU the machine's. Before anything has used it, too.
int64_t memory_bytes_of(at::Device device);

// "NVIDIA H200", or "cpu".
std::string device_name(at::Device device);

// Queues a call on the current stream, made by a thread of the driver's: what is launched behind it waits until it
// returns. It may use no device. False on CPU, where nothing is queued.
bool queue_call(at::Device device, void (*call)(void*));

}  // namespace trireme
