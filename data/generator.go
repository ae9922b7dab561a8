package data

import (
	"encoding/binary"
	"fmt"
	"math"
	"sync"
)

// Generator is torch.Generator on the CPU, in Go: the same seed gives the numbers that Python draws, to the bit, and a
// state moves between the two in the bytes of torch.Generator.get_state.
//
// A Generator may be used by several goroutines, whose order then decides who gets which number.
type Generator struct {
	mu   sync.Mutex
	seed uint64
	left int // draws until the next block of numbers is due, counted as the C++ engine does
	next int
	mt   [mtN]uint32
	tail [stateSize - stateTail]byte // cached normals: never drawn here, carried along for Python
}

const (
	mtN = 624
	mtM = 397

	// Layout of torch.Generator.get_state: seed, left, seeded, next, 624 words of 8 bytes, cached normals.
	stateSize = 5056
	stateTail = 24 + 8*mtN

	// From here on a permutation draws 64 bits an element, since 32 would be visibly skewed.
	largePerm = math.MaxUint32 / 20
)

// NewGenerator makes a generator that starts at seed, as torch.Generator().manual_seed(seed) does.
func NewGenerator(seed int64) *Generator {
	g := &Generator{}
	g.ManualSeed(seed)
	return g
}

// ManualSeed restarts the generator.
func (g *Generator) ManualSeed(seed int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seed = uint64(seed)
	g.mt[0] = uint32(seed)
	for j := 1; j < mtN; j++ {
		g.mt[j] = 1812433253*(g.mt[j-1]^g.mt[j-1]>>30) + uint32(j)
	}
	g.left, g.next = 1, 0
	clear(g.tail[:])
}

// InitialSeed is the seed the generator was last started from.
func (g *Generator) InitialSeed() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return int64(g.seed)
}

// refill computes the next 624 words.
func (g *Generator) refill() {
	twist := func(u, v uint32) uint32 {
		y := u&0x80000000 | v&0x7fffffff
		return y>>1 ^ -(v&1)&0x9908b0df
	}
	s := &g.mt
	for j := range mtN - mtM {
		s[j] = s[j+mtM] ^ twist(s[j], s[j+1])
	}
	for j := mtN - mtM; j < mtN-1; j++ {
		s[j] = s[j+mtM-mtN] ^ twist(s[j], s[j+1])
	}
	s[mtN-1] = s[mtM-1] ^ twist(s[mtN-1], s[0])
	g.left, g.next = mtN, 0
}

// draw gives 32 bits. The caller holds the lock.
func (g *Generator) draw() uint32 {
	if g.left--; g.left == 0 {
		g.refill()
	}
	y := g.mt[g.next]
	g.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

func (g *Generator) draw64() uint64 {
	high := uint64(g.draw())
	return high<<32 | uint64(g.draw())
}

// Random64 draws what torch.empty((), dtype=torch.int64).random_() gives: 0 to 2^63-1.
func (g *Generator) Random64() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return int64(g.draw64() &^ (1 << 63))
}

// Rand draws an element of torch.rand: a float32 in [0, 1).
func (g *Generator) Rand() float32 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return float32(g.draw()&(1<<24-1)) * (1.0 / (1 << 24))
}

// Randint fills dst as torch.randint(high, size) would. high must be positive.
func (g *Generator) Randint(high int64, dst []int) error {
	if high <= 0 {
		return fmt.Errorf("data: randint needs a positive high, got %d", high)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range dst {
		if high >= 1<<28 {
			dst[i] = int(g.draw64() % uint64(high))
		} else {
			dst[i] = int(uint64(g.draw()) % uint64(high))
		}
	}
	return nil
}

// Perm gives torch.randperm(n).
func (g *Generator) Perm(n int) []int {
	if n <= 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p := make([]int, n)
	for i := range p {
		p[i] = i
	}
	if n < largePerm {
		for i := range n - 1 {
			j := i + int(g.draw()%uint32(n-i))
			p[i], p[j] = p[j], p[i]
		}
		return p
	}
	for i := range n {
		j := int(g.draw64() % uint64(i+1))
		p[i] = p[j]
		p[j] = i
	}
	return p
}

// State gives the bytes of torch.Generator.get_state.
func (g *Generator) State() []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := make([]byte, stateSize)
	le := binary.LittleEndian
	le.PutUint64(b[0:], g.seed)
	le.PutUint32(b[8:], uint32(g.left))
	le.PutUint32(b[12:], 1)
	le.PutUint64(b[16:], uint64(g.next))
	for i, w := range g.mt {
		le.PutUint64(b[24+8*i:], uint64(w))
	}
	copy(b[stateTail:], g.tail[:])
	return b
}

// SetState continues from what State, or torch.Generator.get_state, gave.
func (g *Generator) SetState(b []byte) error {
	if len(b) != stateSize {
		return fmt.Errorf("data: a generator's state has %d bytes, got %d", stateSize, len(b))
	}
	le := binary.LittleEndian
	left, seeded, next := int32(le.Uint32(b[8:])), le.Uint32(b[12:]), le.Uint64(b[16:])
	// With left > 1 the engine reads on from next without a new block: never past its end, whatever the bytes say.
	if seeded != 1 || left < 1 || next > mtN || left > 1 && uint64(left)+next > mtN+1 {
		return fmt.Errorf("data: not the state of a CPU generator (seeded %d, left %d, next %d)", seeded, left, next)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seed, g.left, g.next = le.Uint64(b), int(left), int(next)
	for i := range g.mt {
		g.mt[i] = uint32(le.Uint64(b[24+8*i:]))
	}
	copy(g.tail[:], b[stateTail:])
	return nil
}
