#include "trainer/cli/commands.h"

int main(int argc, char** argv) { return trireme::cli_main(argc, argv); }
