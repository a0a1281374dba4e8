#include "csrc/attention/sm90/forward/launch.cuh"

const jaxmagi::sm90::ForwardKernel jaxmagi::sm90::kForwardD192V128 = ForwardInstance<192, 128, 3, 80, 64>::kKernel;
