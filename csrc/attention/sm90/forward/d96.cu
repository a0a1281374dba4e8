#include "csrc/attention/sm90/forward/launch.cuh"

const jaxmagi::sm90::ForwardKernel jaxmagi::sm90::kForwardD96 = ForwardInstance<96, 96, 3, 112, 80>::kKernel;
