#include "csrc/attention/sm90/backward/launch.cuh"

const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD192 = BackwardInstance<192, 192, 64, 96, 3, 2, 1>::kKernel;
