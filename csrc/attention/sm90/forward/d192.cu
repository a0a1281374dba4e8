#include "csrc/attention/sm90/forward/instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD192 = ForwardInstance<192, 192, 2, 112, 112>::kKernel;

}  // namespace jaxmagi::sm90
