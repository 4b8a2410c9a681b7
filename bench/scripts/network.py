"""Train a network with random weights on random images; not one line about Hermes."""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

CLASSES = 10
SHAPE = (32, 32, 3)


def inception(x: Any, sizes: tuple[int, int, int, int, int, int]) -> Any:  # noqa: ANN401 - Keras
    """One module of GoogLeNet: 1x1, 3x3, 5x5 and pooling branches side by side."""
    from keras import layers

    one, three_in, three, five_in, five, pool = sizes
    conv = {"padding": "same", "activation": "relu"}
    a = layers.Conv2D(one, 1, **conv)(x)
    b = layers.Conv2D(three, 3, **conv)(layers.Conv2D(three_in, 1, **conv)(x))
    c = layers.Conv2D(five, 5, **conv)(layers.Conv2D(five_in, 1, **conv)(x))
    d = layers.MaxPooling2D(3, strides=1, padding="same")(x)
    return layers.Concatenate()([a, b, c, layers.Conv2D(pool, 1, **conv)(d)])


def googlenet() -> Any:  # noqa: ANN401 - Keras
    """Inception v1 (Szegedy et al. 2015, table 1), without the auxiliary classifiers."""
    import keras
    from keras import layers

    conv = {"padding": "same", "activation": "relu"}
    pool = {"strides": 2, "padding": "same"}
    image = keras.Input(SHAPE)
    x = layers.Conv2D(64, 7, strides=2, **conv)(image)
    x = layers.MaxPooling2D(3, **pool)(x)
    x = layers.Conv2D(192, 3, **conv)(layers.Conv2D(64, 1, **conv)(x))
    x = layers.MaxPooling2D(3, **pool)(x)
    x = inception(x, (64, 96, 128, 16, 32, 32))
    x = inception(x, (128, 128, 192, 32, 96, 64))
    x = layers.MaxPooling2D(3, **pool)(x)
    x = inception(x, (192, 96, 208, 16, 48, 64))
    x = inception(x, (160, 112, 224, 24, 64, 64))
    x = inception(x, (128, 128, 256, 24, 64, 64))
    x = inception(x, (112, 144, 288, 32, 64, 64))
    x = inception(x, (256, 160, 320, 32, 128, 128))
    x = layers.MaxPooling2D(3, **pool)(x)
    x = inception(x, (256, 160, 320, 32, 128, 128))
    x = inception(x, (384, 192, 384, 48, 128, 128))
    x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(CLASSES, activation="softmax")(x))


def small() -> Any:  # noqa: ANN401 - Keras
    """A convolutional network as a beginner writes it."""
    import keras
    from keras import layers

    conv = {"padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            layers.Conv2D(32, 3, **conv),
            layers.Conv2D(32, 3, **conv),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, **conv),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def build(name: str) -> Any:  # noqa: ANN401 - Keras
    """The network of that name, with random weights."""
    import keras

    own = {"googlenet": googlenet, "small": small}
    if name in own:
        return own[name]()
    known = {"vgg16": "VGG16", "vgg19": "VGG19", "resnet50": "ResNet50"}
    make = getattr(keras.applications, known[name])
    return make(weights=None, input_shape=SHAPE, classes=CLASSES)


def main() -> None:
    """Train for so many epochs of so many steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="small")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--timings", help="write the seconds of each epoch into this file")
    options = parser.parse_args()

    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    chance = np.random.default_rng(1)
    images = chance.random((options.steps * options.batch, *SHAPE), dtype="float32")
    labels = chance.integers(CLASSES, size=len(images))
    model = build(options.network)
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    moments = [time.monotonic()]
    stamp = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: moments.append(time.monotonic()))
    callbacks = [stamp] if options.timings else []
    model.fit(
        images,
        labels,
        batch_size=options.batch,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=2,
    )
    if options.timings:
        epochs_s = [end - start for start, end in pairwise(moments)]
        Path(options.timings).write_text(json.dumps(epochs_s))


if __name__ == "__main__":
    main()
