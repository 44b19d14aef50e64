// The `yolo` dialect. Shapes are logical (N, C, H, W; weights O, I, KH, KW) whatever the physical
// order, which is the tensor's encoding. IRDL checks kinds; verification.py checks the rest.
//
// A kernel launch is no op of this dialect but `func.call` with the unit attribute `yolo.dispatch`: it
// calls a private function whose body is what the kernel computes.
irdl.dialect @yolo {
  // The physical order of a tensor's elements. A tensor without it lies in logical order.
  irdl.attribute @layout {
    %nhwc = irdl.is "nhwc"
    %ohwi = irdl.is "ohwi"
    %hwio = irdl.is "hwio"
    %order = irdl.any_of(%nhwc, %ohwi, %hwio)
    irdl.parameters(order: %order)
  }

  // A tensor of the weight store that travels beside the module, by its name there.
  irdl.operation @weight {
    %y = irdl.base "!builtin.tensor"
    %name = irdl.base "#builtin.string"
    irdl.results(y: %y)
    irdl.attributes { "name" = %name }
  }

  // uint8 pixels to float32: y = float(image) * scale.
  irdl.operation @normalize {
    %image = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %scale = irdl.base "#builtin.float"
    irdl.operands(image: %image)
    irdl.results(y: %y)
    irdl.attributes { "scale" = %scale }
  }

  // 2-D convolution (cross-correlation). padding: top, left, bottom, right. A float16 weight
  // multiplies a float16 tensor (or the image); sums and bias are float32, the result either.
  irdl.operation @conv2d {
    %x = irdl.base "!builtin.tensor"
    %w = irdl.base "!builtin.tensor"
    %bias = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %pair = irdl.base "#builtin.dense_array"
    %quad = irdl.base "#builtin.dense_array"
    %int = irdl.base "#builtin.integer"
    irdl.operands(x: %x, w: %w, bias: optional %bias)
    irdl.results(y: %y)
    irdl.attributes { "strides" = %pair, "padding" = %quad, "groups" = %int }
  }

  // y = (x - mean) / sqrt(variance + epsilon) * gamma + beta, a channel at a time.
  irdl.operation @batch_norm {
    %x = irdl.base "!builtin.tensor"
    %gamma = irdl.base "!builtin.tensor"
    %beta = irdl.base "!builtin.tensor"
    %mean = irdl.base "!builtin.tensor"
    %variance = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %epsilon = irdl.base "#builtin.float"
    irdl.operands(x: %x, gamma: %gamma, beta: %beta, mean: %mean, variance: %variance)
    irdl.results(y: %y)
    irdl.attributes { "epsilon" = %epsilon }
  }

  // y = x * sigmoid(x).
  irdl.operation @silu {
    %x = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    irdl.operands(x: %x)
    irdl.results(y: %y)
  }

  irdl.operation @add {
    %lhs = irdl.base "!builtin.tensor"
    %rhs = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    irdl.operands(lhs: %lhs, rhs: %rhs)
    irdl.results(y: %y)
  }

  // Concatenation along channels of two tensors. (IRDL's variadics demand one type for all; longer
  // concatenations nest.)
  irdl.operation @concat {
    %lhs = irdl.base "!builtin.tensor"
    %rhs = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    irdl.operands(lhs: %lhs, rhs: %rhs)
    irdl.results(y: %y)
  }

  // Channels [offset, offset + size).
  irdl.operation @slice {
    %x = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %offset = irdl.base "#builtin.integer"
    %size = irdl.base "#builtin.integer"
    irdl.operands(x: %x)
    irdl.results(y: %y)
    irdl.attributes { "offset" = %offset, "size" = %size }
  }

  irdl.operation @max_pool2d {
    %x = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %kernel = irdl.base "#builtin.dense_array"
    %strides = irdl.base "#builtin.dense_array"
    %padding = irdl.base "#builtin.dense_array"
    irdl.operands(x: %x)
    irdl.results(y: %y)
    irdl.attributes { "kernel" = %kernel, "strides" = %strides, "padding" = %padding }
  }

  // Nearest neighbour, by a whole factor: y[h, w] = x[h / factor, w / factor].
  irdl.operation @upsample {
    %x = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %factor = irdl.base "#builtin.integer"
    irdl.operands(x: %x)
    irdl.results(y: %y)
    irdl.attributes { "factor" = %factor }
  }

  // Multi-head self-attention over the H*W positions. Channels of qkv, a head after the other:
  // key_dim of q, key_dim of k, head_dim of v. y = v softmax(q^T k * scale)^T, head after head.
  irdl.operation @attention {
    %qkv = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %heads = irdl.base "#builtin.integer"
    %key_dim = irdl.base "#builtin.integer"
    %head_dim = irdl.base "#builtin.integer"
    %scale = irdl.base "#builtin.float"
    irdl.operands(qkv: %qkv)
    irdl.results(y: %y)
    irdl.attributes { "heads" = %heads, "key_dim" = %key_dim, "head_dim" = %head_dim,
                      "scale" = %scale }
  }

  // Decode and two-stage top-k of the end-to-end head, from the box maps (N, 4, H, W) and the
  // class-logit maps (N, classes, H, W) of the three levels. Rows: x1, y1, x2, y2, score, class.
  irdl.operation @detect {
    %box_p3 = irdl.base "!builtin.tensor"
    %box_p4 = irdl.base "!builtin.tensor"
    %box_p5 = irdl.base "!builtin.tensor"
    %class_p3 = irdl.base "!builtin.tensor"
    %class_p4 = irdl.base "!builtin.tensor"
    %class_p5 = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %strides = irdl.base "#builtin.dense_array"
    %max_det = irdl.base "#builtin.integer"
    irdl.operands(box_p3: %box_p3, box_p4: %box_p4, box_p5: %box_p5,
                  class_p3: %class_p3, class_p4: %class_p4, class_p5: %class_p5)
    irdl.results(y: %y)
    irdl.attributes { "strides" = %strides, "max_det" = %max_det }
  }

  // The best detections of the two finer levels, as @detect chooses them, with what their order goes
  // by. Rows: x1, y1, x2, y2, score, class, logit, the largest logit of its anchor; best first.
  irdl.operation @candidates {
    %box_p3 = irdl.base "!builtin.tensor"
    %box_p4 = irdl.base "!builtin.tensor"
    %class_p3 = irdl.base "!builtin.tensor"
    %class_p4 = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %strides = irdl.base "#builtin.dense_array"
    %max_det = irdl.base "#builtin.integer"
    irdl.operands(box_p3: %box_p3, box_p4: %box_p4, class_p3: %class_p3, class_p4: %class_p4)
    irdl.results(y: %y)
    irdl.attributes { "strides" = %strides, "max_det" = %max_det }
  }

  // The best of the candidates of finer levels and of one more level. Of equal logits that of the
  // anchor with the larger largest comes first, then the candidates, in their order.
  irdl.operation @merge_detections {
    %candidates = irdl.base "!builtin.tensor"
    %box = irdl.base "!builtin.tensor"
    %class = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    %stride = irdl.base "#builtin.integer"
    irdl.operands(candidates: %candidates, box: %box, class: %class)
    irdl.results(y: %y)
    irdl.attributes { "stride" = %stride }
  }

  // The only op that moves data between layouts: same logical tensor, another physical order.
  irdl.operation @convert_layout {
    %x = irdl.base "!builtin.tensor"
    %y = irdl.base "!builtin.tensor"
    irdl.operands(x: %x)
    irdl.results(y: %y)
  }
}
