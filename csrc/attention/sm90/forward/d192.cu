#include "csrc/attention/sm90/forward/launch.cuh"

const jaxmagi::sm90::ForwardKernel jaxmagi::sm90::kForwardD192 = ForwardInstance<192, 192, 2, 112, 112>::kKernel;
