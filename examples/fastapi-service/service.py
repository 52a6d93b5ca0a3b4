"""Orders go into a topic; totals come out of it."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

import tierlog


class Order(BaseModel):
    customer: str
    item: str
    price: float


totals: defaultdict[str, float] = defaultdict(float)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with tierlog.AsyncClient() as client, client.producer() as producer:
        app.state.producer = producer
        follower = asyncio.create_task(follow(client))
        yield
        follower.cancel()
        await asyncio.wait([follower])


async def follow(client: tierlog.AsyncClient) -> None:
    """From the first order on: the totals are what the topic says, nothing else is stored."""
    async with aclosing(client.consume("orders", follow=True)) as records:
        async for record in records:
            order = Order.model_validate_json(record.value or b"")
            totals[order.customer] += order.price


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(order: Order) -> dict[str, int]:
    """Answers once the broker has flushed it; the key keeps a customer's orders in sequence."""
    sent = await app.state.producer.send("orders", order.model_dump_json(), key=order.customer)
    placed = await sent
    return {"partition": placed.partition, "offset": placed.offset}


@app.get("/totals")
async def show() -> dict[str, float]:
    return totals
