// TensorBoard: scalars and the configuration as an event file.
#pragma once

#include <filesystem>
#include <memory>

#include "trainer/trackers/tracker.h"

namespace trireme {

// Writes events.out.tfevents.TIME.HOST.PID into `folder`: TFRecords (length, masked CRC-32C, bytes, masked CRC-32C) of
// tensorflow.Event messages. A resumed run begins with a session start at its first new step, from which on TensorBoard
// forgets what older files of the folder hold.
std::unique_ptr<Tracker> make_tensorboard(const std::filesystem::path& folder);

}  // namespace trireme
