// The opaque 128-byte descriptor of a tensor for TMA. Included by host and by device code, so it includes nothing.
#pragma once

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};
