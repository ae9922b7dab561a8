package pair

import (
	"fmt"
	"os"
	"strings"
)

// Memory tells what of this process is in memory, in bytes: "resident", "proportional" (pages shared with others count
// in part) and "private".
func Memory() (Answer, error) {
	text, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		return nil, err
	}
	kib := func(field string) float64 {
		var n float64
		for line := range strings.Lines(string(text)) {
			if rest, ok := strings.CutPrefix(line, field+":"); ok {
				_, err = fmt.Sscan(rest, &n)
				return n * 1024
			}
		}
		err = fmt.Errorf("no %s in /proc/self/smaps_rollup", field)
		return 0
	}
	a := Answer{"resident": {kib("Rss")}, "proportional": {kib("Pss")},
		"private": {kib("Private_Clean") + kib("Private_Dirty")}}
	return a, err
}
