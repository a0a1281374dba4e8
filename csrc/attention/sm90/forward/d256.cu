#include "csrc/attention/sm90/forward/launch.cuh"

const jaxmagi::sm90::ForwardKernel jaxmagi::sm90::kForwardD256 = ForwardInstance<256, 256, 2, 80, 64>::kKernel;
