#include "csrc/attention/sm90/forward/launch.cuh"

const jaxmagi::sm90::ForwardKernel jaxmagi::sm90::kForwardD64 = ForwardInstance<64, 64, 3, 128, 96>::kKernel;
