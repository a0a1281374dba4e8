#include "csrc/attention/sm90/forward_instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD96 = ForwardInstance<96, 96, 2, BlockWidths{176, 128}, BlockWidths{144, 144}>::kKernel;

}  // namespace jaxmagi::sm90
