"""Train a small convolutional network on scikit-learn's handwritten digits."""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--filters", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--optimizer", choices=["adam", "sgd", "rmsprop"], default="adam")
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    images = np.kron(images, np.ones((1, 2, 2, 1), dtype="float32"))  # 16 x 16 pixels
    return train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)


def build_model(filters, dropout):
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            keras.layers.Conv2D(filters, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(2 * filters, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main():
    arguments = parse_arguments()
    keras.utils.set_random_seed(1)
    x_train, x_test, y_train, y_test = load_data()
    model = build_model(arguments.filters, arguments.dropout)
    optimizer = keras.optimizers.get(arguments.optimizer)
    optimizer.learning_rate = arguments.learning_rate
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        x_train,
        y_train,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=(x_test, y_test),
        verbose=2,
    )


if __name__ == "__main__":
    main()
