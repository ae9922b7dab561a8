package report

import "math"

// maxPoints is how many points of a curve are kept: as many as a page has pixels for.
const maxPoints = 800

// series is a curve of any length in bounded memory: when it is full, neighbours are merged into their mean.
type series struct {
	points []point
	per    int   // values that make a point
	open   point // not full yet
	last   float64
	seen   int
	odd    int // NaN and infinities, which no chart can show
}

// point is a mean with the range of what it is the mean of.
type point struct {
	x, y, low, high float64
	n               int
}

// huge is where differences begin to overflow, and nobody looks.
const huge = 1e100

func (s *series) add(x, y float64) {
	s.last = y
	s.seen++
	if math.IsNaN(y) || math.Abs(y) > huge {
		s.odd++
		return
	}
	s.open = s.open.merge(point{x, y, y, y, 1})
	if s.open.n < max(s.per, 1) {
		return
	}
	s.points = append(s.points, s.open)
	s.open = point{}
	if len(s.points) == maxPoints {
		for i := range maxPoints / 2 {
			s.points[i] = s.points[2*i].merge(s.points[2*i+1])
		}
		s.points = s.points[:maxPoints/2]
		s.per = max(s.per, 1) * 2
	}
}

// all are the points with the one that is not full.
func (s *series) all() []point {
	if s == nil {
		return nil
	}
	if s.open.n == 0 {
		return s.points
	}
	return append(s.points[:len(s.points):len(s.points)], s.open)
}

// mean is that of all values.
func (s *series) mean() (float64, bool) {
	var sum point
	for _, p := range s.all() {
		sum = sum.merge(p)
	}
	return sum.y, sum.n > 0
}

func (p point) merge(q point) point {
	if p.n == 0 {
		return q
	}
	if q.n == 0 {
		return p
	}
	n := p.n + q.n
	w := float64(q.n) / float64(n)
	return point{p.x + (q.x-p.x)*w, p.y + (q.y-p.y)*w, min(p.low, q.low), max(p.high, q.high), n}
}
