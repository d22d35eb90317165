"""Start a sandbox and run a command in it: python examples/python/start_a_sandbox.py"""

import asyncio

import pier


async def main() -> None:
    async with pier.sandbox("host", workdir="/w", limits=pier.Limits(memory=1 << 30)) as box:
        await box.write_file("hello.py", "import sys\nprint('hello from', sys.platform)\n")
        result = await box.exec("python3 hello.py | tee out.txt", timeout=60)
        print(result.exit_code, result.text, end="")
        for entry in await box.list_dir():
            print(f"{entry.mode:o} {entry.size:>4} {entry.name}")
        try:
            await box.read_text("missing.txt")
        except FileNotFoundError as error:
            print(error)
        refused = await box.exec("getent hosts example.org")
        print("the network is", "open" if refused.ok else "closed")


if __name__ == "__main__":
    asyncio.run(main())
