// Addresses of this host and of peers: numbers, whatever DNS does.
#include "trainer/parallel/own_address.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>

#include <string>

namespace trireme {
namespace {

TEST(OwnAddress, IsTheOneTowardsAPeer) { EXPECT_EQ(own_address_towards("127.0.0.1"), "127.0.0.1"); }

// As LibTorch finds it: c10d asks so before it connects.
TEST(OwnAddress, AnAddressHasNoNameInDns) {
  using Function = decltype(&::getnameinfo);
  const auto as_a_library = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, "getnameinfo"));
  ASSERT_NE(as_a_library, nullptr);
  sockaddr_in6 mapped{};
  mapped.sin6_family = AF_INET6;
  ASSERT_EQ(::inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr), 1);
  sockaddr_in plain{};
  plain.sin_family = AF_INET;
  ASSERT_EQ(::inet_pton(AF_INET, "127.0.0.1", &plain.sin_addr), 1);
  const auto name_of = [&](const void* address, socklen_t length) {
    char host[NI_MAXHOST], port[NI_MAXSERV];
    const int problem =
        as_a_library(static_cast<const sockaddr*>(address), length, host, NI_MAXHOST, port, NI_MAXSERV, NI_NUMERICSERV);
    return problem == 0 ? std::string(host) : std::string(::gai_strerror(problem));
  };
  EXPECT_EQ(name_of(&plain, sizeof plain), "127.0.0.1") << "and not localhost";
  EXPECT_EQ(name_of(&mapped, sizeof mapped), "::ffff:127.0.0.1");
}

}  // namespace
}  // namespace trireme
