// MLflow: a run of a tracking server, by its REST API 2.0.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "trainer/trackers/tracker.h"

namespace trireme {

struct MlflowOptions {
  std::string tracking_uri;  // http(s)://host[:port][/prefix]
  std::string experiment_name = "Default";
  std::string run_name;              // empty: the server chooses one
  std::filesystem::path state_file;  // keeps the run's id, so that a resumed run goes on in it
  std::string token;                 // bearer token; or
  std::string username, password;
  Milliseconds timeout{10000};  // of one request
};

// Throws Error(kUser) for an address that is none, or one with credentials in it.
std::unique_ptr<Tracker> make_mlflow(const MlflowOptions& options);

}  // namespace trireme
