// RewardPlace: what rewards take from where the process runs, for folders that do not read the environment.
#pragma once

#include <map>
#include <string>

namespace trireme {

struct RewardPlace {
  std::string url;                                 // of an http reward without one
  std::map<std::string, std::string> environment;  // the variables that headers ask for (environment_of_headers)
};

}  // namespace trireme
