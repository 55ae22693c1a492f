"""pip install . gives rlhf_jax with its configs; extras:
test, report, rouge, wandb, trackio, cuda, cuda12, tpu, tpu-aot."""

import pathlib

from setuptools import find_packages, setup

setup(
    name="rlhf_jax",
    version="0.1.0",
    description="RLHF in JAX: supervised fine-tuning, reward models and PPO on GPT-NeoX, from a laptop to a TPU pod",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["rlhf_jax", "rlhf_jax.*"]), "rlhf_jax.configs"],
    package_dir={"rlhf_jax.configs": "configs"},
    package_data={"rlhf_jax.report": ["*.css", "*.js", "uplot/*"]},
    install_requires=[
        "jax>=0.10,<0.12",
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12,<0.13",
        "chex>=0.1.92,<0.2",
        "filelock>=3",
        "numpy>=2.0,<3",
        "scipy>=1.15,<2",
        "transformers>=5.0,<6",
        "datasets>=5.0,<6",
        "huggingface_hub>=1.31,<3",
        "safetensors>=0.8,<1",
        "tensorboardX>=2.6.5,<3",
        "tyro>=1.0,<2",
        "rich>=13",
        "jinja2>=3.1.6",
    ],
    extras_require={
        "test": [
            "pytest>=9,<10",
            "pytest-xdist>=3.8,<4",
            "hypothesis>=6.150,<7",
            "ruff>=0.17,<0.18",
            "setuptools>=77",
            "torch==2.13.0",
            "trl==1.12.0",
            "peft>=0.21,<0.22",
            "requests>=2.30,<3",
            "matplotlib>=3.9,<4",
            "rouge-score>=0.1.2,<0.2",
            "selenium>=4.35,<5",
        ],
        "report": ["matplotlib>=3.9,<4"],
        "rouge": ["rouge-score>=0.1.2,<0.2"],
        "wandb": ["wandb>=0.25,<1"],
        "trackio": ["trackio>=0.20,<1"],
        "cuda": ["jax[cuda13]"],
        "cuda12": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
        "tpu-aot": ["libtpu>=0.0.51,<0.1"],
    },
)
