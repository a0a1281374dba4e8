#include "csrc/attention/sm90/backward/launch.cuh"

const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD256 = BackwardInstance<256, 256, 64, 64, 2, 2, 1>::kKernel;
