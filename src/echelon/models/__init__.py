"""Networks: encoders of the market, and the actor-critic of the flat agent on top of them."""

from echelon.models.actor_critic import (
    N_ACTIONS,
    Acting,
    ActorCritic,
    ActorCriticOutput,
    MarketTensors,
)
from echelon.models.encoders import Encoder, TimeCNN, TransformerEncoder, build_encoder
from echelon.models.expert import ExpertActor, ExpertCritic, ExpertObs
from echelon.models.timesnet import TimesNet, choose_periods

__all__ = [
    "N_ACTIONS",
    "Acting",
    "ActorCritic",
    "ActorCriticOutput",
    "Encoder",
    "ExpertActor",
    "ExpertCritic",
    "ExpertObs",
    "MarketTensors",
    "TimeCNN",
    "TimesNet",
    "TransformerEncoder",
    "build_encoder",
    "choose_periods",
]
