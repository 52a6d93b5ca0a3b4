// Reads the history of conditional appends to one log, as JSON lines (tests/fakes/append_history.py),
// and says whether it is linearizable: exits with 0 if it is, with 1 if it is not, with 2 if that was
// not found out.
//
// An append whose outcome is unknown may take effect at any time after its call, or never: it had none
// if it is not in the log as that was read at the end, which is the last operation. An append that
// is answered with 412 tells where the log ends.
package main

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

type row struct {
	Client   int      `json:"client"`
	Call     int64    `json:"call"`
	Return   int64    `json:"return"`
	Expected int      `json:"expected"`
	Value    string   `json:"value"`
	Outcome  string   `json:"outcome"`
	End      int      `json:"end"`
	Log      []string `json:"log"`
}

type log struct {
	end    int
	digest uint64
}

func (l log) append(value string) log {
	digest := fnv.New64a()
	fmt.Fprintf(digest, "%d %s", l.digest, value)
	return log{l.end + 1, digest.Sum64()}
}

var model = porcupine.Model{
	Init: func() any { return log{} },
	Step: func(state, input, _ any) (bool, any) {
		now, asked := state.(log), input.(row)
		if asked.Outcome == "read" {
			read := log{}
			for _, value := range asked.Log {
				read = read.append(value)
			}
			return now == read, now
		}
		if asked.Outcome == "mismatch" {
			return now.end == asked.End && now.end != asked.Expected, now
		}
		if now.end == asked.Expected {
			return true, now.append(asked.Value)
		}
		return false, now
	},
}

func main() {
	var rows []row
	read := map[string]bool{}
	for lines := json.NewDecoder(os.Stdin); ; {
		var one row
		if err := lines.Decode(&one); err == io.EOF {
			break
		} else if err != nil {
			panic(err)
		}
		for _, value := range one.Log {
			read[value] = true
		}
		rows = append(rows, one)
	}
	var operations []porcupine.Operation
	for _, one := range rows {
		if one.Outcome == "refused" || one.Outcome == "unknown" && !read[one.Value] {
			continue
		}
		if one.Outcome == "unknown" {
			one.Return = math.MaxInt64
		}
		operations = append(operations, porcupine.Operation{
			ClientId: one.Client, Input: one, Call: one.Call, Return: one.Return,
		})
	}
	switch porcupine.CheckOperationsTimeout(model, operations, 2*time.Minute) {
	case porcupine.Ok:
		fmt.Println("linearizable:", len(operations), "operations")
	case porcupine.Illegal:
		fmt.Println("not linearizable")
		os.Exit(1)
	default:
		fmt.Println("not found out in time")
		os.Exit(2)
	}
}
