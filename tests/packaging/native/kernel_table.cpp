// Prints the table of a family's attention kernels, one per line: image/kernel. TABLE is its header, FAMILY its
// namespace.
#include TABLE

#include <cstdio>

int main() {
  for (const FAMILY::KernelInfo& kernel : FAMILY::kKernels) std::printf("%s/%s\n", kernel.image, kernel.name);
}
